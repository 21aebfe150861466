"""train: an adapter for a small encoder of token ids, by a contrastive loss over a whole batch.

A line's query is its first half, its document the second half; every query is compared with all documents of its batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from stages.run import Run
from stages.settings import setting
from stages.stage import Stage
from stages.tuner import loop
from stages.tuner.checkpoint import ADAPTER
from stages.tuner.config import ScheduleConfig, TrainingConfig
from stages.tuner.control import Control
from stages.tuner.loop import wanted_rows
from stages.tuner.order import Order
from tests.stages.tuner.toy import LENGTH, WORDS, Pairs, ToyTask
from tests.toy.schemas import LINES, TOKENS, TRAIN


@dataclass(frozen=True)
class TrainConfig(TrainingConfig):
    """[train]: the settings of any training, with defaults for a tiny encoder."""

    rank: int = setting(2, "rank of the adapter")
    lr: float = setting(1e-2, "learning rate")
    precision: Any = setting("float32", "what the encoder computes in")  # noqa: RUF009
    schedule: ScheduleConfig = setting(ScheduleConfig(warmup_steps=1), "the learning rate over the steps")  # noqa: RUF009


class LineReader:
    """Reads the token ids of lines from the table tokens."""

    def __init__(self, run: Run[Any]) -> None:
        self.tokens = run.inputs.tensors(TOKENS)

    def prefetch(self, samples: Iterable[str]) -> None:
        self.tokens.ahead(samples)

    def read(self, step: int, samples: list[str]) -> Pairs:
        ids = np.stack([np.resize(self.tokens.read(line_id, "ids"), 2 * LENGTH) for line_id in samples]) % WORDS
        rarity = np.stack([np.resize(self.tokens.read(line_id, "rarity"), 2 * LENGTH) for line_id in samples])
        assert (ids.dtype, rarity.dtype) == (np.int32, np.int8)
        return Pairs(samples, ids[:, :LENGTH], ids[:, LENGTH:])


class LineTask(ToyTask):
    """The toy task of the tuner's tests, on the lines of a project."""

    def __init__(self, run: Run[Any]) -> None:
        super().__init__(run.config, run.report.say)
        self.run = run
        self.lines = sorted(run.inputs.rows(LINES)["line_id"].to_pylist())
        self.schema = TRAIN.batch
        self.order = Order([LENGTH] * len(self.lines), self.config.batch_size, self.config.seed, self.config.accumulate)

    def draw(self, step: int) -> list[list[str]]:
        return [[self.lines[row] for row in batch.rows] for batch in self.order.step(step)]

    def reader(self) -> LineReader:
        return LineReader(self.run)

    def row(self, sample: str) -> dict[str, Any]:
        return {"line_id": sample}

    def description(self) -> str:
        return f"{len(self.lines)} lines"


def wanted_samples(run: Run[Any]) -> pa.Table:
    """(step, split, sample) of every line that the run draws."""
    task = LineTask(run)
    return wanted_rows(task, loop.last_step(task, run.output.stored))


def train(run: Run[Any]) -> Iterator[pa.RecordBatch]:
    return loop.train(run, LineTask(run), Control(run, run.config))


def snapshot(run: Run[Any]) -> pa.Table:
    return run.inputs.rows(LINES).select(["line_id"])


STAGE = Stage(
    reads=(TOKENS, LINES),
    writes=TRAIN,
    config=TrainConfig,
    wants=wanted_samples,
    run=train,
    snapshot=snapshot,
    divisible=False,
    result=ADAPTER,
)
