"""The stage train: an adapter and the head of a retriever, by a contrastive loss. One row per pair of a step.

The training loop is `stages.tuner.loop`; its task is `task.PairTask`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from schemas.retrieval.negatives import NEGATIVES
from schemas.retrieval.pairs import PAIRS
from schemas.retrieval.tokens import TOKENS
from schemas.retrieval.train import TRAIN
from stages.hashing import file_sha256
from stages.retrieval.train.config import TrainConfig
from stages.retrieval.train.dataset import load_dataset
from stages.retrieval.train.forecast import forecast
from stages.retrieval.train.task import PairTask
from stages.run import Run
from stages.stage import Stage
from stages.tuner import loop
from stages.tuner.checkpoint import ADAPTER
from stages.tuner.control import Control
from stages.tuner.rows import wanted_rows


def wanted_samples(run: Run[Any]) -> pa.Table:
    task = PairTask(run)
    return wanted_rows(task, loop.last_step(task, run.output.stored))


def snapshot(run: Run[Any]) -> pa.Table:
    """What the result depends on: the texts, group and negatives of every pair, and the initial adapter."""
    data = run.once(load_dataset)
    rows = [("train", p.query_id, p.text_id, p.group, " ".join(p.negatives)) for p in data.trained]
    rows += [("held out", p.query_id, p.text_id, p.group, "") for p in data.held]
    if run.config.initial:
        file = run.root / run.config.initial
        if not file.is_file():
            raise ValueError(f"[train] initial: there is no file {file}")
        rows.append(("initial", file_sha256(file), "", "", ""))
    names = ("use", "query_id", "text_id", "group", "negatives")
    return pa.table({name: [row[n] for row in rows] for n, name in enumerate(names)})


def train(run: Run[Any]) -> Iterator[pa.RecordBatch]:
    control = Control(run, run.config)  # first, so that a `stop` that appears while tables are read takes effect
    return loop.train(run, PairTask(run), control)


STAGE = Stage(
    reads=(TOKENS, PAIRS, NEGATIVES),
    writes=TRAIN,
    config=TrainConfig,
    needs=("family", "encoder"),
    wants=wanted_samples,
    run=train,
    forecast=forecast,
    snapshot=snapshot,
    divisible=False,
    result=ADAPTER,
)
