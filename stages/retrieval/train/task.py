"""The task of training a retriever, which the training loop in `stages.tuner` runs."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import pyarrow as pa

from schemas.retrieval.train import TRAIN
from stages.models.t5.config import T5Config
from stages.models.t5.encoder import T5
from stages.retrieval.adapter import read_adapter
from stages.retrieval.train import memory_plan
from stages.retrieval.train.config import TrainConfig, bits_of
from stages.retrieval.train.dataset import Dataset, load_dataset
from stages.retrieval.train.objective import Contrast
from stages.retrieval.train.reader import HeldOutPairs, PairReader, Sample
from stages.stage import StageContext
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.memory_plan import MemoryPlan
from stages.tuner.order import Order
from stages.tuner.quantize import pack_if_possible
from stages.tuner.step import choose_targets
from stages.tuner.task import InitialAdapter

POOLS = 8  # most groups of documents of similar length
POOL_BATCHES = 4  # batches that a group has at least, so that its pairs meet in ever new batches


class PairTask:
    """The task of training a retriever on pairs of a query and the document that answers it. The class implements
    `stages.tuner.task.Task`, which the training loop calls. The task draws and reads the pairs, loads the encoder and
    defines the loss. It also supplies the columns of the table `train` that only a retriever has.
    """

    def __init__(self, ctx: StageContext, data: Dataset | None = None) -> None:
        """Prepare a training run of a retriever. `ctx` supplies the settings of the section [train] and the tables to
        read. `data` is the dataset if it is already loaded; None loads it. Raises ValueError if the tables or settings
        leave nothing to train on.
        """
        config: TrainConfig = ctx.config
        self.ctx, self.config = ctx, config
        self.family = ctx.need("family")
        self.data = data or load_dataset(ctx, config)
        pools = length_pools([pair.length for pair in self.data.trained], config.batch_size)
        self.order = Order(pools, config.batch_size, config.seed, config.accumulate)
        self.held_out = HeldOutPairs(ctx, self.data) if config.validation else None
        self.objective = Contrast(config.loss)

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the record batches of the table `train`. A row is one training or held-out pair of a
        step.
        """
        schema: pa.Schema = TRAIN.batch
        return schema

    @functools.cached_property
    def sizes_of_model(self) -> T5Config:
        """The sizes of the encoder and its head, such as the number of layers. They are read from the folder of the
        encoder's weights.
        """
        found: T5Config = self.family.architecture.sizes(self.ctx.need("encoder"))
        return found

    @functools.cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The shape (outputs, inputs) of every Linear of the encoder and its head, by name."""
        found: dict[str, tuple[int, int]] = self.family.architecture.meta_encoder(self.sizes_of_model, mx.float32).linears()
        return found

    @functools.cached_property
    def metadata(self) -> Mapping[str, str]:
        """The task's entries for the header of an adapter file, as a dict of strings. "family" is the name of the model
        family. "linears" is a JSON list of the names of all trained Linears.
        """
        names = [target.name for target in choose_targets(self.linears, self.config)]
        return {"family": self.family.name, "linears": json.dumps(names)}

    def sizes(self, step: int) -> list[int]:
        """Return the number of pairs in each batch of step `step` (from 1). All batches are full."""
        return [self.config.batch_size] * self.config.accumulate

    def draw(self, step: int) -> list[list[Sample]]:
        """Return the training pairs of step `step` (from 1), as one list of samples per batch. A sample is a pair and
        the number of its epoch. Equal settings and data give equal samples.
        """
        return [[Sample(self.data.trained[row], batch.epoch) for row in batch.rows] for batch in self.order.step(step)]

    def reader(self) -> PairReader:
        """Return a new reader that loads batches of training pairs from the table `tokens`. Its method `read` returns
        one batch of padded token ids.
        """
        return PairReader(self.ctx, self.data, self.config.hard_negatives)

    def row(self, sample: Sample) -> dict[str, Any]:
        """Return the values of `sample` for the table `train`, as a dict from column name to value. The columns are
        `epoch`, `pair_id`, `query_id` and `text_id`. `sample` is one training pair in one epoch.
        """
        pair = sample.pair
        return {"epoch": sample.epoch, "pair_id": pair.pair_id, "query_id": pair.query_id, "text_id": pair.text_id}

    def warnings(self) -> Iterator[str]:
        """Yield one line of text for the user per setting of the section [train] that is valid but rarely intended."""
        if self.config.accumulate > 1:
            yield (
                "accumulate compares the pairs of each batch alone; raise batch_size and set micro_batch to compare more"
                " pairs in the same memory"
            )
        if self.config.loss.form == "sum" and self.config.loss.temperature < 0.2:
            yield f'form = "sum" wants a temperature of about 1, got {self.config.loss.temperature:g}'

    @property
    def expected_loss(self) -> None:
        """Return None: the loss of an untrained model depends on the pairs of a batch, so no value is expected."""

    def description(self) -> str:
        """Return one line of text that tells the user which data the run trains on. It gives the number of training
        pairs and of batches per epoch. It also gives the number of hard negatives and held-out pairs, if there are any.
        """
        line = f"{len(self.data.trained)} pairs, {self.order.per_epoch:.1f} batches per epoch"
        if self.config.hard_negatives:
            given = sum(len(pair.negatives) for pair in self.data.trained)
            line += f", {given} hard negatives"
        return line + (f"; {len(self.data.held)} pairs are held out" if self.data.held else "")

    def memory_plan(self, start: Checkpoint | None, recorded: bool = False) -> MemoryPlan:
        """Choose the memory plan of the run and return it. A memory plan says how many pairs are computed at once, and
        how many blocks (layers) keep their activations. `start` is the checkpoint to continue from, or None for a new
        run. If `recorded` is False, the setting [train] `memory` decides. If `recorded` is True, the plan that `start`
        has recorded is preferred, whatever the setting says. Raises ValueError if no allowed plan fits into memory.

        `recorded` is True if steps of an earlier run are computed again. The setting then counts as "auto". With
        "auto", the plan in `start` is kept if it fits. If it does not fit, or if there is none, the fastest plan that
        fits is chosen.
        """
        config = dataclasses.replace(self.config, memory="auto") if recorded else self.config
        return memory_plan.choose(config, self.family.architecture, self.sizes_of_model, self.data, start, self.ctx.say)

    def initial_adapter(self) -> InitialAdapter | None:
        """Read the adapter from which training starts: the file of the setting [train] `initial`. Return `(arrays,
        scales)`, or None if the setting is empty. `arrays` maps the names of the adapter's arrays to the arrays,
        float32. `scales` maps the name of each Linear to the number that multiplies the adapter's change of this
        Linear. Raises ValueError if the adapter is incomplete or does not fit the model.
        """
        if not self.config.initial:
            return None
        return read_adapter(self.ctx.root / self.config.initial, self.linears)

    def load_model(self) -> T5:
        """Load the frozen encoder with its head, and return it as one model. The weights of its Linears are quantised
        to the bits that the section [train] sets. A weight whose shape does not allow this keeps the dtype of the
        setting `precision`.
        """
        architecture, sizes = self.family.architecture, self.sizes_of_model
        dtype = getattr(mx, self.config.precision)
        weights: dict[str, Any] = architecture.load_weights(self.ctx.need("encoder"), sizes, dtype, self.family.head_seed)
        for name in self.linears:
            weights[f"{name}.weight"] = pack_if_possible(weights[f"{name}.weight"], bits_of(name, self.config))
        model: T5 = architecture.build_encoder(sizes, weights)
        return model


def length_pools(lengths: list[int], batch_size: int) -> list[int]:
    """Divide rows into pools of similar length, and return the number of the pool of each row, from 0. `lengths` holds
    the length of each row in tokens. `batch_size` is the number of rows in a batch. There are at most 8 pools. If there
    are several, each has rows for at least 4 batches.

    A batch takes its rows from one pool, so that it needs little padding.
    """
    pools = max(1, min(POOLS, len(lengths) // (POOL_BATCHES * batch_size)))
    ranked = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))
    found = [0] * len(lengths)
    for place, row in enumerate(ranked):
        found[row] = place * pools // len(lengths)
    return found
