"""What the training loop asks of a task, as protocols: how a batch is drawn and read, its loss, and what a row says.

The loop (loop.py) owns everything else: order of steps, micro-batches, clipping, optimizer, averages, checkpoints, resuming,
health. A task knows its tables and its model; the loop knows neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import mlx.core as mx
import pyarrow as pa

from stages.tuner.blockwise.backprop import Arrays, Chain, Loss
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.config import TrainingConfig
from stages.tuner.memory_plan import MemoryPlan

Row = dict[str, Any]
InitialAdapter = tuple[Arrays, dict[str, float]]  # arrays by "<linear><ending>", float32; the scale of each Linear

S = TypeVar("S")  # a sample, before anything of it is read
M = TypeVar("M", bound="MicroBatch")
M_contra = TypeVar("M_contra", bound="MicroBatch", contravariant=True)
M_co = TypeVar("M_co", bound="MicroBatch", covariant=True)


class MicroBatch(Protocol):
    """Samples that can be computed together, in host memory."""

    @property
    def samples(self) -> Sequence[Any]:
        """The samples, in order."""

    @property
    def tokens(self) -> int:
        """Tokens of one sample, padding included. Memory plans measure micro-batches in tokens."""

    def part(self, start: int, stop: int) -> Self:
        """Return the samples start .. stop - 1 as a micro-batch of their own."""


class Model(Chain, Protocol):
    """A chain of blocks that an adapter can be trained on."""

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype that the model computes in."""

    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of every Linear within a block, by its full name: the Linears that can get an adapter."""


@dataclass(frozen=True)
class Term:
    """One term of a micro-batch's loss: the model's inputs, and the loss of the model's prediction.

    `loss(prediction)` returns losses_B, one float32 value per sample; the mean over all samples of a step is minimised. Its
    arrays must be keywords of a `functools.partial`, so that they become arguments of a compiled graph. `column` names the
    column of the rows that the values are written to. `applies[n]` is False if sample n has no such term; None: all have.
    """

    inputs: Mapping[str, Any]
    loss: Loss
    column: str = "loss"
    applies: Sequence[bool] | None = None


class Objective(Protocol[M_contra]):
    """What training minimises.

    `separable`: the loss of a sample does not depend on the other samples of its batch, so that a batch may be computed in
    several micro-batches. A loss that compares samples with each other, as contrastive losses do, is not separable.
    """

    @property
    def separable(self) -> bool: ...

    def terms(self, model: Any, micro: M_contra) -> Iterator[Term]:
        """Yield the terms of a micro-batch's loss, one at a time. The first is the loss itself, of every sample."""

    def validation_term(self, model: Any, micro: M_contra) -> Term:
        """Return the loss that held-out samples are measured by. Nothing is trained by it."""


class Reader(Protocol[S, M_co]):
    """Reads micro-batches from disk into host memory. It is called from a thread of its own."""

    def prefetch(self, samples: Iterable[S]) -> None:
        """Announce the samples of the next step. The samples read before are copied by now and may be dropped."""

    def read(self, step: int, samples: list[S]) -> M_co:
        """Read one micro-batch of a step, counted from 1."""


class HeldOut(Protocol[M_co]):
    """Samples that are never trained on. Each measurement of a run uses all of them, in the same order."""

    @property
    def count(self) -> int:
        """Samples of one measurement."""

    def micro_batches(self) -> Iterator[M_co]:
        """Read the samples of one measurement, micro-batch by micro-batch."""


class Task(Protocol[S, M]):
    """A training run, apart from the loop that runs it."""

    @property
    def config(self) -> TrainingConfig:
        """The section [train] of the project."""

    @property
    def objective(self) -> Objective[M]:
        """What training minimises."""

    @property
    def held_out(self) -> HeldOut[M] | None:
        """The samples that the run is measured by; None without [train.validation]."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of a row. The loop fills step, split, sample, loss, lr, grad_norm, seconds, read_seconds, peak_bytes."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Entries for the headers of adapter files, beside provenance and adapter settings."""

    def sizes(self, step: int) -> list[int]:
        """The number of samples of each batch of a step. Cheap: it is called for every step of the run."""

    def draw(self, step: int) -> list[list[S]]:
        """Draw the samples of a step, batch by batch: a pure function of (seed, step). The batches make one optimizer step."""

    def reader(self) -> Reader[S, M]:
        """Open the tables that micro-batches are read from."""

    def row(self, sample: S) -> Row:
        """The task's own columns of the row of one sample."""

    def warnings(self) -> Iterator[str]:
        """Lines for the user about settings that are valid but rarely intended."""

    def description(self) -> str:
        """One line for the user: what the run trains on."""

    def memory_plan(self, start: Checkpoint | None, recorded: bool = False) -> MemoryPlan:
        """Choose how steps are computed, for a run that goes on from `start`; None: from the beginning.

        `recorded`: take the plan that `start` records if it fits, whatever [train] memory says. ValueError in one line, with a
        remedy, if nothing fits into memory.
        """

    def initial_adapter(self) -> InitialAdapter | None:
        """Read the adapter that [train] initial names; None without one. ValueError if it does not fit the model."""

    def load_model(self) -> Model:
        """Load the frozen model, its weights packed as [train] base_bits says."""


class TrainingContext(Protocol):
    """What the loop needs from the code that runs it. A StageContext has all of it."""

    @property
    def artifacts(self) -> Path:
        """The folder of checkpoints, results and control files. The loop writes to it only by `write_artifact`."""

    @property
    def stored(self) -> pa.Table:
        """The rows of the run that are stored already."""

    @property
    def pending(self) -> pa.Table:
        """(step, split, sample) of every row that is wanted and not stored."""

    @property
    def provenance(self) -> dict[str, str]:
        """Recipe and versions, for the headers of adapter files."""

    @property
    def write_artifact(self) -> Callable[[str, Callable[[Path], None]], Path]:
        """(name, write) -> path: the file appears whole or not at all."""

    @property
    def say(self) -> Callable[[str], None]:
        """Print one line for the user."""

    @property
    def progress(self) -> Callable[[int, int, str], None]:
        """(done, total, unit): update the progress bar."""

    @property
    def stop(self) -> Callable[[], bool]:
        """Return True once the user has asked to stop."""

    @property
    def pause(self) -> Callable[[str], None]:
        """Give the reason why the run ends before its last step."""
