"""What the stage `train` needs, from shapes alone. `memory_plan` makes the plan of a run from its data."""

from __future__ import annotations

from dataclasses import replace

from schemas.text_to_image.images import IMAGES
from stages.forecast import Forecast, Outlook
from stages.text_to_image.sizes import largest_image
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.memory_plan import BatchShape, MemoryEstimator, cheapest_fit, lower_resolution
from stages.tuner.blockwise.device import memory_budget


def forecast(outlook: Outlook) -> Forecast:
    config: TrainConfig = outlook.sections["train"]
    family, architecture = outlook.family, outlook.family.architecture
    width, height = largest_image(outlook)
    batch = BatchShape(config.batch_size, width, height, family.text_tokens, architecture.pixels_per_token)
    images = outlook.rows(IMAGES)
    shown = max((row["reference"] or 0 for row in images.to_pylist()), default=0) if images is not None else 0
    batch = replace(batch, references=(batch.grid,) * shown)  # none is larger than the largest image
    estimator = MemoryEstimator(config, architecture, architecture.transformer_config(outlook.weights("transformer"), family))
    budget = min(outlook.budget, memory_budget(config.memory_gb)) if config.memory_gb else outlook.budget
    found = estimator.best(batch, budget)
    advice = ""
    if found.needs > budget:
        cheapest = cheapest_fit(estimator, batch, budget)
        # A lower resolution is the last remedy.
        advice, needs = (
            (str(cheapest), cheapest.needs) if cheapest.needs <= budget else lower_resolution(estimator, batch, budget)
        )
        advice = advice if needs <= budget else ""
    checkpoints = -(-config.steps // config.checkpoint_every)
    files = checkpoints * estimator.adapter + min(checkpoints, config.keep_states) * estimator.state + sum(estimator.stored)
    plan = f"plan {found.plan}, {config.base_bits} bits, {width} x {height} px"
    rows = config.steps * config.batch_size * config.accumulate
    return Forecast(found.needs, 0, rows, files, plan, advice)
