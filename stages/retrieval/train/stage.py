"""The stage train: an adapter and the head of a retriever, by a contrastive loss. One row per pair of a step."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import pyarrow as pa

from schemas.retrieval import NEGATIVES, PAIRS, TOKENS, TRAIN
from stages.hashing import file_sha256
from stages.models.t5.model import T5, T5Config
from stages.retrieval.encoder import read_adapter
from stages.retrieval.train.config import TrainConfig
from stages.retrieval.train.data import HeldOutPairs, PairReader, Sample, load_dataset
from stages.retrieval.train.memory import PairEstimator, forecast
from stages.retrieval.train.objective import Contrast
from stages.run import Run
from stages.stage import Stage
from stages.tuner import checkpoint, loop
from stages.tuner.adapters.targets import by_pattern
from stages.tuner.checkpoint import ADAPTER
from stages.tuner.control import Control
from stages.tuner.loop import wanted_rows
from stages.tuner.order import Order
from stages.tuner.replay import remake_checkpoints
from stages.tuner.step import choose_targets
from stages.tuner.task import InitialAdapter
from stages.tuner.weights import pack_if_possible

POOLS = 8  # most groups of documents of similar length
POOL_BATCHES = 4  # batches that a group has at least, so that its pairs meet in ever new batches


class PairTask:
    """`stages.tuner.task.Task` for pairs of a query and its document. Raises ValueError if there is nothing to train on."""

    schema: pa.Schema = TRAIN.batch
    expected_loss = None  # the loss of an untrained model depends on the pairs of a batch

    def __init__(self, run: Run[TrainConfig]) -> None:
        config = run.config
        self.run, self.config = run, config
        self.family = run.needs["family"]
        self.family.require_trained()
        self.data = run.once(load_dataset)
        pools = length_pools([pair.length for pair in self.data.trained], config.batch_size)
        self.order = Order(pools, config.batch_size, config.seed, config.accumulate)
        self.held_out = HeldOutPairs(run, self.data) if config.validation else None
        self.objective = Contrast(config.loss)

    @functools.cached_property
    def sizes_of_model(self) -> T5Config:
        found: T5Config = self.family.architecture.sizes(self.run.needs["encoder"])
        return found

    @functools.cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Name -> (outputs, inputs)."""
        found: dict[str, tuple[int, int]] = self.family.architecture.meta_encoder(self.sizes_of_model, mx.float32).linears()
        return found

    @functools.cached_property
    def metadata(self) -> Mapping[str, str]:
        """Header of an adapter file: family, and a JSON list of the trained Linears."""
        names = [target.name for target in choose_targets(self.linears, self.config)]
        return {"family": self.family.name, "linears": json.dumps(names)}

    def sizes(self, step: int) -> list[int]:
        return [self.config.batch_size] * self.config.accumulate

    def draw(self, step: int) -> list[list[Sample]]:
        return [[Sample(self.data.trained[row], batch.epoch) for row in batch.rows] for batch in self.order.step(step)]

    def reader(self) -> PairReader:
        return PairReader(self.run, self.data, self.config.hard_negatives)

    def row(self, sample: Sample) -> dict[str, Any]:
        pair = sample.pair
        return {"epoch": sample.epoch, "pair_id": pair.pair_id, "query_id": pair.query_id, "text_id": pair.text_id}

    def warnings(self) -> Iterator[str]:
        if self.config.accumulate > 1:
            yield (
                "accumulate compares the pairs of each batch alone; raise batch_size and set micro_batch to compare more"
                " pairs in the same memory"
            )
        if self.config.loss.form == "sum" and self.config.loss.temperature < 0.2:
            yield f'form = "sum" wants a temperature of about 1, got {self.config.loss.temperature:g}'

    def description(self) -> str:
        line = f"{len(self.data.trained)} pairs, {self.order.per_epoch:.1f} batches per epoch"
        if self.config.hard_negatives:
            given = sum(len(pair.negatives) for pair in self.data.trained)
            line += f", {given} hard negatives"
        return line + (f"; {len(self.data.held)} pairs are held out" if self.data.held else "")

    def estimator(self) -> PairEstimator:
        return PairEstimator(self.config, self.family.architecture, self.sizes_of_model, self.data.longest)

    def initial_adapter(self) -> InitialAdapter | None:
        """(arrays, scales) of [train] initial. Raises ValueError if it is incomplete or does not fit the model."""
        if not self.config.initial:
            return None
        return read_adapter(self.run.root / self.config.initial, self.linears)

    def load_model(self) -> T5:
        """Quantised as [train] says; a weight whose shape does not allow it keeps `precision`."""
        architecture, sizes = self.family.architecture, self.sizes_of_model
        dtype = getattr(mx, self.config.precision)
        weights: dict[str, Any] = architecture.load_weights(self.run.needs["encoder"], sizes, dtype, self.family.head_seed)
        for name in self.linears:
            bits = by_pattern(name, self.config.base_bits_for, self.config.base_bits)
            weights[f"{name}.weight"] = pack_if_possible(weights[f"{name}.weight"], bits)
        model: T5 = architecture.build_encoder(sizes, weights)
        return model


def length_pools(lengths: list[int], batch_size: int) -> list[int]:
    """The pool of each row: at most POOLS, of similar length, for POOL_BATCHES each. A batch is of one, and so padded little."""
    pools = max(1, min(POOLS, len(lengths) // (POOL_BATCHES * batch_size)))
    # Measured: 31 % of the tokens of random batches are padding, 6 % of batches of similar length.
    ranked = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))
    found = [0] * len(lengths)
    for place, row in enumerate(ranked):
        found[row] = place * pools // len(lengths)
    return found


def wanted_samples(run: Run[TrainConfig]) -> pa.Table:
    task = PairTask(run)
    return wanted_rows(task, loop.last_step(task, run.output.stored))


def snapshot(run: Run[TrainConfig]) -> pa.Table:
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


def train(run: Run[TrainConfig]) -> Iterator[pa.RecordBatch]:
    control = Control(run, run.config)  # first, so that a `stop` that appears while tables are read takes effect
    return loop.train(run, PairTask(run), control)


def repair(run: Run[TrainConfig]) -> Iterator[str]:
    """Train again to recreate damaged checkpoints. One stays damaged if training now gives another adapter."""
    if checkpoint.damaged_checkpoints(run.output.artifacts):
        yield from remake_checkpoints(run, PairTask(run))


STAGE = Stage(
    reads=(TOKENS, PAIRS, NEGATIVES),
    writes=TRAIN,
    config=TrainConfig,
    needs=("family", "encoder"),
    wants=wanted_samples,
    run=train,
    computes=loop.computed_rows,
    repair=repair,
    forecast=forecast,
    snapshot=snapshot,
    divisible=False,
    result=ADAPTER,
)
