"""The stage train: an adapter and the head of a retriever, by a contrastive loss. One row per pair of a step.

The training loop is `stages.tuner.loop`; its task is `task.PairTask`.
"""

from __future__ import annotations

from collections.abc import Iterator

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
from stages.stage import Stage, StageContext
from stages.tuner import loop
from stages.tuner.checkpoint import ADAPTER
from stages.tuner.control import Control
from stages.tuner.rows import wanted_rows


def wanted_samples(ctx: StageContext) -> pa.Table:
    """Return the keys of all rows that the run must produce, as an Arrow table. `ctx` is the stage's context: its input
    tables and settings. A row stands for the use of one pair at one step. The column `step` is the training step.
    `split` is "train", or "validation" for the measurement of a held-out pair. `sample` is the position of the pair in
    the step, from 0.
    """
    task = PairTask(ctx)
    return wanted_rows(task, loop.last_step(task, ctx.stored))


def snapshot(ctx: StageContext) -> pa.Table:
    """Return the data that the run's result depends on, as an Arrow table of texts. `ctx` is the stage's context: its
    input tables and settings. The table has one row per pair. `use` is "train" or "held out". `query_id` and `text_id`
    are the keys of query and document. `group` names the pair's duplicate group. `negatives` are the keys of the hard
    negatives, separated by spaces. Raises ValueError if the tables lack needed rows, or if the adapter file that
    [train] `initial` names does not exist.

    Pairs with equal queries or equal documents are in one duplicate group. If [train] `initial` names an adapter, one
    more row has the `use` "initial". Its `query_id` is the sha256 of the adapter's file.
    """
    data = load_dataset(ctx, ctx.config)
    rows = [("train", p.query_id, p.text_id, p.group, " ".join(p.negatives)) for p in data.trained]
    rows += [("held out", p.query_id, p.text_id, p.group, "") for p in data.held]
    if ctx.config.initial:
        file = ctx.root / ctx.config.initial
        if not file.is_file():
            raise ValueError(f"[train] initial: there is no file {file}")
        rows.append(("initial", file_sha256(file), "", "", ""))
    names = ("use", "query_id", "text_id", "group", "negatives")
    return pa.table({name: [row[n] for row in rows] for n, name in enumerate(names)})


def train(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Train from the newest checkpoint to the last step, and yield the rows of each step as record batches. `ctx` is
    the stage's context: its input tables and settings.
    """
    control = Control(ctx, ctx.config)  # first, so that a `stop` that appears while tables are read takes effect
    yield from loop.train(ctx, PairTask(ctx), control)


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
