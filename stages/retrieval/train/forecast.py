"""What the stage `train` needs, from shapes alone. `memory_plan` makes the plan of a run from its data."""

from __future__ import annotations

from stages.forecast import Forecast, Outlook
from stages.retrieval.forecasts import counts, encoder_sizes
from stages.retrieval.train.config import TrainConfig
from stages.retrieval.train.memory_plan import MemoryEstimator
from stages.tuner.blockwise.device import memory_budget
from stages.tuner.memory_plan import Candidate, cheapest_remedy


def forecast(outlook: Outlook) -> Forecast:
    config: TrainConfig = outlook.sections["train"]
    queries, documents = counts(outlook)
    longest = int(queries.max()), int(documents.max())
    sizes, architecture = encoder_sizes(outlook), outlook.family.architecture
    budget = min(outlook.budget, memory_budget(config.memory_gb)) if config.memory_gb else outlook.budget

    def candidate(settings: TrainConfig) -> Candidate:
        return MemoryEstimator(settings, architecture, sizes, longest).best(budget)

    estimator = MemoryEstimator(config, architecture, sizes, longest)
    found, advice = estimator.best(budget), ""
    if found.needs > budget:
        remedy = cheapest_remedy(config, config.batch_size, candidate, budget)
        advice = str(remedy) if remedy.needs <= budget else ""
    checkpoints = -(-config.steps // config.checkpoint_every)
    files = checkpoints * found.estimate.adapter + min(checkpoints, config.keep_states) * estimator.state
    bits = f", {config.base_bits} bits" if config.base_bits < 16 else ""
    plan = f"plan {found.plan}{bits}, {config.batch_size} pairs"
    return Forecast(found.needs, 0, config.steps * config.batch_size * config.accumulate, files, plan, advice)
