"""The memory that training on pairs takes, from shapes alone. `stages.tuner.memory` decides what is made of it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from stages.memory import LOSS_WORK, T5_STEPWISE, Forecast, Outlook, Settings, changed
from stages.models.attention import slow_exp
from stages.models.family import RetrieverArchitecture
from stages.models.t5.model import T5Config
from stages.retrieval.memory import counts, encoder_sizes
from stages.retrieval.train.config import TrainConfig
from stages.retrieval.train.data import DOCUMENT_STEP, QUERY_STEP
from stages.retrieval.train.objective import zero_inputs
from stages.tuner import memory
from stages.tuner.adapters.targets import by_pattern
from stages.tuner.memory import Blocks, Estimator, trace
from stages.tuner.ranks import connect
from stages.tuner.step import build_optimizer, choose_targets


class PairEstimator(Estimator[TrainConfig]):
    """`longest`: tokens of the longest query and of the longest document."""

    def __init__(
        self, config: TrainConfig, architecture: RetrieverArchitecture, sizes: T5Config, longest: tuple[int, int]
    ) -> None:
        self.architecture, self.sizes, self.longest = architecture, sizes, longest
        self.query, self.document = (-(-n // step) * step for n, step in zip(longest, (QUERY_STEP, DOCUMENT_STEP), strict=True))
        self.samples, self.most = config.batch_size // connect().size, config.batch_size
        self.of = f"for {config.batch_size} pairs"
        self.tokens = self.query + (1 + config.hard_negatives) * self.document  # padding included
        model = architecture.meta_encoder(sizes, getattr(mx, config.precision))
        linears = model.linears()
        bits = {f"{name}.weight": by_pattern(name, config.base_bits_for, config.base_bits) for name in linears}
        shapes = {name: (shape, bits.get(name, 16)) for name, shape in sizes.shapes().items()}
        super().__init__(config, model, shapes, shapes, choose_targets(linears, config), build_optimizer(config))

    def blocks(self, samples: int) -> Blocks:
        c, documents = self.config, 1 + self.config.hard_negatives
        vectors = 4 * c.batch_size * self.tokens * self.sizes.dimensions
        similarities = 4 * c.batch_size**2 * documents * self.query * self.document
        scores = samples * documents * self.sizes.num_heads * self.document**2 * self.dtype.size
        work, whole = LOSS_WORK * (vectors + similarities), samples >= c.batch_size
        rates: dict[str, Any] = T5_STEPWISE | {"saved_scores": scores} if slow_exp(mx.zeros(0, self.dtype)) else {}
        return trace(
            self.model,
            zero_inputs(samples, documents, self.query, self.document),
            self.targets,
            # The mask of all blocks is as large as one's scores.
            optimizer_state=self.state + (work if whole else 2 * vectors) + scores,
            optimizer_work=self.update,
            scores=scores,
            validation=0 if whole else work,
            **self.frozen,
            **rates,
        )

    def changed(self, settings: Settings) -> PairEstimator:
        return PairEstimator(changed(self.config, settings.get("train", {})), self.architecture, self.sizes, self.longest)


def forecast(outlook: Outlook) -> Forecast:
    outlook.family.require_trained()
    config: TrainConfig = outlook.sections["train"]
    queries, documents = counts(outlook)
    longest = int(queries.max()), int(documents.max())
    estimator = PairEstimator(config, outlook.family.architecture, encoder_sizes(outlook), longest)
    bits = f", {config.base_bits} bits" if config.base_bits < 16 else ""
    return memory.forecast(estimator, outlook.budget, f"{bits}, {config.batch_size} pairs")
