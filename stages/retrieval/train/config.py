"""The section [train] of a retrieval project: the settings of any training run, and those of pairs of query and document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stages.settings import COUNT, NUMBER, WHOLE, Section, selects, setting
from stages.tuner import config as tuner
from stages.tuner.config import ScheduleConfig, TrainingConfig


@dataclass(frozen=True)
class LossConfig(Section):
    # XTR's advantage over MaxSim was not reproduced under control (arXiv 2605.00646).
    kind: Literal["info_nce", "xtr"] = setting(
        "info_nce", "xtr: a query token sees only its top_k most similar tokens of the batch, as XTR was trained"
    )
    form: Literal["mean", "sum"] = setting("mean", "MaxSim over the query tokens: their mean, or their sum as in ColBERT")
    temperature: float = setting(
        0.05,
        "divides the scores; the sum form wants about 1, being longer by the length of a query",
        unit="score",
        bounds=(1e-6, NUMBER[1]),
    )
    symmetric: bool = setting(False, "also compare every document with all queries, and take the mean of both losses")
    margin: float = setting(
        0.2, "score by which the own document should beat the hardest other one", unit="score", bounds=(0.0, NUMBER[1])
    )
    margin_weight: float = setting(
        0.0, "factor of the margin loss beside the loss; 0: none", unit="factor", bounds=(0.0, NUMBER[1])
    )
    top_k: int = setting(256, "xtr: tokens of the batch that a query token retrieves", unit="tokens", bounds=COUNT)


@dataclass(frozen=True)
class ValidationConfig(tuner.ValidationConfig):
    """The settings [train.validation]. The loss of a query is 1 - 1 / rank of its own document; its mean is 1 - MRR."""

    every: int = setting(
        50, "steps between two measurements; the first is before the first step", unit="steps", bounds=(1, 1_000_000)
    )
    queries: int = setting(
        500,
        "pairs to measure at most; each query is ranked against the documents of all of them",
        unit="pairs",
        bounds=(2, WHOLE[1]),
    )


@dataclass(frozen=True)
class TrainConfig(TrainingConfig):
    steps: int = selects(
        500, "optimizer steps in all; raise it later and the run goes on from where it ended", unit="steps", bounds=(1, 1_000_000)
    )
    batch_size: int = setting(
        64,
        "pairs that are compared with each other; micro_batch divides the work, not the comparison",
        unit="pairs",
        bounds=(2, WHOLE[1]),
    )
    rank: int = setting(16, "rank of the adapter: how much it can hold", unit="columns", bounds=(1, 4096))
    alpha: float | None = setting(
        32.0, "the adapter's output is scaled by alpha / rank; unset: the rank", unit="rank", bounds=(1e-12, 1e6)
    )
    targets: tuple[str, ...] = setting(
        ("q", "k", "v", "o"), "which Linears of the blocks get an adapter, by wildcards; also wi_0, wi_1, wo (wi without gate)"
    )
    full: tuple[str, ...] = setting(("head.linear",), "which Linears are trained in full; [] trains no head")
    lr: float = setting(
        2e-4, "learning rate; LoRA wants about ten times the rate of full training", unit="rate", bounds=(1e-12, 100.0)
    )
    hard_negatives: int = setting(
        0, "documents of the table negatives per pair, compared with every query of the batch", unit="documents", bounds=(0, 64)
    )
    loss: LossConfig = setting(LossConfig(), "the loss of a batch")  # noqa: RUF009
    optimizer: tuner.OptimizerConfig = setting(tuner.OptimizerConfig(weight_decay=0.01), "the method and its numbers")  # noqa: RUF009
    schedule: ScheduleConfig = setting(  # noqa: RUF009
        ScheduleConfig(shape="cosine", warmup_steps=25, decay_steps=475, floor=0.1), "the learning rate over the steps"
    )
    validation: ValidationConfig | None = setting(None, "held-out pairs, to measure the run by")  # noqa: RUF009

    @property
    def trained_whole(self) -> tuple[str, ...]:
        return self.full
