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
        """The samples of the micro-batch, in order."""

    @property
    def tokens(self) -> int:
        """Tokens of one sample, padding included. Memory plans measure micro-batches in tokens."""

    def select(self, start: int, stop: int) -> Self:
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
    """One term of a micro-batch's loss: the model's inputs, and the loss of the model's prediction. `loss(prediction)` returns
    losses_B, one float32 value per sample; the mean over all samples of a step is minimised. Its arrays must be keywords of a
    `functools.partial`, so that they become arguments of a compiled graph. `column` names the column of the rows that the values
    are written to. `applies[n]` is False if sample n has no such term; None: all have.
    """

    inputs: Mapping[str, Any]
    loss: Loss
    column: str = "loss"
    applies: Sequence[bool] | None = None


class Objective(Protocol[M_contra]):
    """The loss that training minimises. It is `separable` if the loss of a sample does not depend on the other samples of its
    batch, so that a batch may be computed in several micro-batches. Contrastive losses are not separable.
    """

    @property
    def separable(self) -> bool:
        """Whether a batch may be computed in several micro-batches."""

    def terms(self, model: Any, batch: M_contra) -> Iterator[Term]:
        """Yield the terms of a micro-batch's loss, one at a time. The first is the loss itself, of every sample."""

    def validation_term(self, model: Any, batch: M_contra) -> Term:
        """Return the loss that held-out samples are measured by. Nothing is trained by it."""


class Reader(Protocol[S, M_co]):
    """Reads micro-batches from disk into host memory. It is called from a thread of its own."""

    def prefetch(self, samples: Iterable[S]) -> None:
        """Start reading the samples of the next step from disk. Earlier samples are in host memory and may be dropped."""

    def read(self, step: int, samples: list[S]) -> M_co:
        """Read the given samples of a step, counted from 1, into host memory."""


class HeldOut(Protocol[M_co]):
    """Samples that are never trained on. Each measurement of a run uses all of them, in the same order."""

    @property
    def count(self) -> int:
        """The number of samples of one measurement."""

    def micro_batches(self) -> Iterator[M_co]:
        """Read the samples of one measurement, micro-batch by micro-batch."""


class Task(Protocol[S, M]):
    """Everything that the training loop does not know of a run: its data, its model, its loss, its rows."""

    @property
    def config(self) -> TrainingConfig:
        """The settings [train] of the project."""

    @property
    def objective(self) -> Objective[M]:
        """The loss that training minimises."""

    @property
    def held_out(self) -> HeldOut[M] | None:
        """The held-out samples that the run is measured by; None without [train.validation]."""

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
        """Return a new reader of micro-batches, with its files open."""

    def row(self, sample: S) -> Row:
        """Return the task's own columns of the row of one sample, by name."""

    def warnings(self) -> Iterator[str]:
        """Yield a line for the user for every setting that is valid but rarely intended."""

    def description(self) -> str:
        """Return one line for the user that says what the run trains on."""

    def memory_plan(self, start: Checkpoint | None, recorded: bool = False) -> MemoryPlan:
        """Choose how steps are computed, for a run that goes on from `start`; None: from the beginning. `recorded`: take the plan
        that `start` records if it fits, whatever [train] memory says. ValueError in one line, with a remedy, if nothing fits into
        memory.
        """

    def initial_adapter(self) -> InitialAdapter | None:
        """Read the adapter that [train] initial names; None without one. ValueError if it does not fit the model."""

    def load_model(self) -> Model:
        """Load the frozen model, its weights packed as [train] base_bits says."""


class TrainingContext(Protocol):
    """What the loop needs from the code that runs it. A StageContext of `stages.stage` has all of it."""

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
        """write_artifact(name, write) -> path: call write(path) so that the file `name` appears whole or not at all."""

    @property
    def say(self) -> Callable[[str], None]:
        """say(line): print one line for the user."""

    @property
    def progress(self) -> Callable[[int, int, str], None]:
        """progress(done, total, unit): update the progress bar."""

    @property
    def stop(self) -> Callable[[], bool]:
        """stop() -> True once the user has asked to stop."""

    @property
    def pause(self) -> Callable[[str], None]:
        """pause(reason): say why the run ends before its last step."""
