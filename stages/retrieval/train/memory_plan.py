"""Which memory a run needs, and the plan that fits, before a weight is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from stages.models.attention import slow_exp
from stages.models.family import RetrieverArchitecture
from stages.models.t5.model import T5Config
from stages.retrieval.train.config import TrainConfig, bits_of
from stages.retrieval.train.data import DOCUMENT_STEP, QUERY_STEP, Dataset
from stages.retrieval.train.objective import zero_inputs
from stages.tuner.adapters.stacks import Stacks
from stages.tuner.blockwise import planner
from stages.tuner.blockwise.device import memory_budget
from stages.tuner.blockwise.planner import Estimate
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.memory_plan import GB, Candidate, MemoryPlan, best_candidate, cheapest_remedy, plan_run
from stages.tuner.ranks import connect
from stages.tuner.step import build_optimizer, choose_targets

# Of T5's blocks where `attend` keeps its probabilities, measured on a CPU.
KEPT = {"saved_rate": 0.8, "work_rates": ((2.0, 1.0),)}
LOSS_WORK = 3  # copies of the similarities of all tokens of a batch while the loss is differentiated


class MemoryEstimator:
    """Estimates from shapes alone. `longest`: tokens of the longest query and of the longest document."""

    def __init__(
        self, config: TrainConfig, architecture: RetrieverArchitecture, sizes: T5Config, longest: tuple[int, int]
    ) -> None:
        self.config, self.architecture, self.sizes = config, architecture, sizes
        self.query, self.document = (-(-n // step) * step for n, step in zip(longest, (QUERY_STEP, DOCUMENT_STEP), strict=True))
        self.dtype: Any = getattr(mx, config.precision)
        self.meta_model = architecture.meta_encoder(sizes, self.dtype)
        linears = self.meta_model.linears()
        names = {name: name.removesuffix(".weight") for name in sizes.shapes()}
        bits = {name: bits_of(linear, config) if linear in linears else 16 for name, linear in names.items()}
        packed = [(shape, bits[name]) for name, shape in sizes.shapes().items()]
        self.weights = planner.weight_bytes(packed, self.dtype.size)
        self.unpacked = planner.unpacked_bytes(packed, self.dtype.size)
        self.targets = choose_targets(linears, config)
        adapter = {t.name + end: mx.zeros(shape) for t in self.targets for end, shape in t.shapes.items()}
        optimizer, stacks = build_optimizer(config), Stacks.of(adapter)
        self.update = optimizer.working_bytes(stacks)
        self.state = sum(value.nbytes for value in optimizer.init(stacks).values())

    @property
    def tokens(self) -> int:
        """Of one query with all its documents, padding included."""
        return self.query + (1 + self.config.hard_negatives) * self.document

    def estimate(self, samples: int) -> Estimate:
        """Of the largest batch, with `samples` pairs computed at once."""
        c, documents = self.config, 1 + self.config.hard_negatives
        inputs = zero_inputs(samples, documents, self.query, self.document)
        vectors = 4 * c.batch_size * self.tokens * self.sizes.dimensions
        similarities = 4 * c.batch_size**2 * documents * self.query * self.document
        scores = samples * documents * self.sizes.num_heads * self.document**2 * self.dtype.size
        work = LOSS_WORK * (vectors + similarities)
        whole = samples >= c.batch_size
        kept = self.state + (work if whole else 2 * vectors) + scores  # the mask of all blocks is as large as one's scores
        rates: dict[str, Any] = KEPT | {"saved_scores": scores} if slow_exp(mx.zeros(0, self.dtype)) else {}
        more = {"unpacked": self.unpacked, "scores": scores, "validation": 0 if whole else work, **rates}
        return planner.estimate(self.meta_model, inputs, self.weights, self.targets, kept, optimizer_work=self.update, **more)

    def best(self, limit: int, begun: Any = None) -> Candidate:
        """What to compute at once within `limit` bytes. It needs more if nothing fits. `begun` is the plan of a resumed run."""
        return best_candidate(self.config, self.config.batch_size // connect().size, self.estimate, limit, begun)


def choose(
    config: TrainConfig,
    architecture: RetrieverArchitecture,
    sizes: T5Config,
    data: Dataset,
    start: Checkpoint | None,
    say: Callable[[str], None],
) -> MemoryPlan:
    """The plan of a run, told to the user. Raises ValueError with settings that would fit if it needs too much."""
    limit = memory_budget(config.memory_gb)

    def candidate(settings: TrainConfig) -> Candidate:
        return MemoryEstimator(settings, architecture, sizes, data.longest).best(limit)

    estimator = MemoryEstimator(config, architecture, sizes, data.longest)
    found = estimator.best(limit, start.state.get("plan") if start else None)
    if found.needs > limit:
        remedy = cheapest_remedy(config, config.batch_size, candidate, limit)
        advice = f"{remedy} would need {remedy.needs / GB:.3g} GB" if remedy.settings else "no setting would need less"
        raise ValueError(
            f"train: plan {found.plan} needs about {found.needs / GB:.3g} GB for {config.batch_size} pairs, more than the "
            f"{limit / GB:.3g} GB that training may take: {advice}"
        )
    return plan_run(config, found, estimator.tokens, limit, start, say)
