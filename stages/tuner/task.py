"""The protocols that a kind of training implements for the training loop: samples, micro-batches, loss, model, rows.

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

from stages.tuner.blockwise.backprop import Loss
from stages.tuner.blockwise.chain import Arrays, Chain
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
    """Samples that are computed together in one pass. Their data are in host memory."""

    @property
    def samples(self) -> Sequence[Any]:
        """The samples of the micro-batch, in order."""

    @property
    def tokens(self) -> int:
        """The number of tokens of one sample, padding included. All samples of a micro-batch have equally many."""

    def select(self, start: int, stop: int) -> Self:
        """Return a new micro-batch with the samples from index `start` up to, but not including, index `stop`."""


class Model(Chain, Protocol):
    """The interface of a model that is computed as a chain of blocks. `linears` names the Linears that can get an
    adapter. `dtype` is the dtype of the computation.
    """

    @property
    def dtype(self) -> mx.Dtype:
        """The MLX dtype that the model computes in."""

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the shape (outputs, inputs) of every Linear within the model's blocks, by the Linear's full name. These are
        the Linears that can get an adapter.
        """


@dataclass(frozen=True)
class Division:
    """Two functions with which one loss term of a batch is computed in parts. `parts(samples)` divides the batch into parts of
    at most `samples` samples. It returns one dict per part: the keyword arguments of the model's method `enter` for this part.
    The model then makes one prediction per part. `join(predictions)` takes these predictions as a list and returns the
    prediction of the whole batch. The loss is computed from the joined prediction.

    Only one part at a time keeps its activations in memory.
    """

    parts: Callable[[int], Sequence[Mapping[str, Any]]]
    join: Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Term:
    """One term of the loss of a micro-batch (samples computed at once). `inputs` are keyword arguments of
    `model.enter`. `loss(prediction)` returns one float32 value per sample. Training minimises the mean of these values
    over a step. `column` is the table column that stores the values. `applies[n]` is False if sample n lacks this term.
    None means that all samples have it.

    `loss` may return a dict instead. The key "loss" then holds the losses. Every other key is a table column, with
    values per sample that are only stored. `names` maps such a column to a list of texts. The column's values are then
    indices into this list. The table stores the texts, and null for a negative index.

    `division` says how to compute the term in parts. It is needed if the objective is not separable and its batches
    shall be divided.

    If `loss` uses arrays, bind them by keyword: `functools.partial(function, name=array)`. They then become arguments
    of a compiled graph.
    """

    inputs: Mapping[str, Any]
    loss: Loss
    column: str = "loss"
    applies: Sequence[bool] | None = None
    names: Mapping[str, Sequence[str]] | None = None
    division: Division | None = None


@dataclass(frozen=True)
class ExpectedLoss:
    """The ratio of losses that a training run should start with: the run's loss divided by the loss of an uninformed
    model, which knows nothing about the data. `uninformed(row)` returns the loss of the uninformed model for one
    sample, or None if this loss is unknown. `nobody` is a text that names the uninformed model in a warning, such as "a
    model that knows nothing about pictures". `start` is the expected range of the ratio, as (smallest, largest).
    `source` says where the range is from. `remedy` says what to check if the ratio is outside.

    The argument `row` is the sample's row in the table of losses. The ratio is computed for each of the first samples,
    and the mean of these ratios is compared with `start`.
    """

    uninformed: Callable[[Row], float | None]
    nobody: str
    start: tuple[float, float]
    source: str
    remedy: str


class Objective(Protocol[M_contra]):
    """The interface of a loss that training minimises. `terms` yields the loss terms of a micro-batch (samples computed
    at once). `validation_term` returns the one term for a micro-batch of held-out samples. `separable` says whether a
    batch may be divided into micro-batches.
    """

    @property
    def separable(self) -> bool:
        """True if the loss of a sample does not depend on the other samples of its batch. The training loop may then
        divide a batch into micro-batches. A contrastive loss is not separable: it compares the samples of a batch with
        each other.

        If the loss is not separable, a batch is divided only if its `Term` has a `division`. A `division` holds two
        functions that compute the term in parts.
        """

    def terms(self, model: Any, batch: M_contra) -> Iterator[Term]:
        """Yield the loss terms of the micro-batch `batch` (samples computed at once), one `Term` at a time. The first
        term is the main loss. It applies to every sample. `model` is the model that is trained.
        """

    def validation_term(self, model: Any, batch: M_contra) -> Term:
        """Return the one loss term that measures the micro-batch `batch` of held-out samples. `model` is the model that
        is measured. Training does not minimise this term.
        """


class Reader(Protocol[S, M_co]):
    """The interface of a reader that copies samples from disk into host memory. `read` returns samples as one
    micro-batch. `prefetch` starts to read the samples of the next step. The training loop calls `read` in a background
    thread.
    """

    def prefetch(self, samples: Iterable[S]) -> None:
        """Start reading the data of `samples` from disk in the background. `samples` are all samples of the next step.
        Data of the samples of earlier calls may be released.
        """

    def read(self, step: int, samples: list[S]) -> M_co:
        """Read the data of `samples` into host memory and return them as one micro-batch. `step` is the step of these samples,
        counted from 1.
        """


class HeldOut(Protocol[M_co]):
    """The interface of the held-out samples, which are never trained on. `count` is the number of samples.
    `micro_batches()` reads them from disk. Every measurement of a run uses all of them, in one fixed order.
    """

    @property
    def count(self) -> int:
        """The number of held-out samples of one measurement."""

    def micro_batches(self) -> Iterator[M_co]:
        """Read the held-out samples from disk and yield them as micro-batches, in order."""


class Task(Protocol[S, M]):
    """The interface between the training loop and one kind of training. An implementation supplies the data, the model, the
    loss and the columns of the result rows. The loop supplies everything else. `S` is the type of a sample, `M` that of a
    micro-batch.
    """

    @property
    def config(self) -> TrainingConfig:
        """The settings of the project's section [train]."""

    @property
    def objective(self) -> Objective[M]:
        """The loss that training minimises."""

    @property
    def held_out(self) -> HeldOut[M] | None:
        """The held-out samples that measure the run. It is None without [train.validation]."""

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the run's table, one row per sample. The loop fills the columns `step`, `split`, `sample`,
        `loss`, `lr`, `grad_norm`, `seconds`, `read_seconds` and `peak_bytes`. The method `row` fills the others.
        """

    @property
    def metadata(self) -> Mapping[str, str]:
        """Text entries that the task adds to the header of every adapter file: key -> text. The loop adds provenance and
        adapter settings.
        """

    def sizes(self, step: int) -> list[int]:
        """Return the number of samples in each batch of step `step`, as a list with one number per batch. `step` counts
        from 1. This method must be fast, because the loop calls it for every step of the run.
        """

    def draw(self, step: int) -> list[list[S]]:
        """Draw the samples of step `step` and return them as one list per batch. `step` counts from 1. All batches
        together make one optimizer step. The result must depend on the seed and the step alone.
        """

    def reader(self) -> Reader[S, M]:
        """Return a new `Reader` of samples. Its files are already open. A reader copies samples from disk and returns
        them as micro-batches in host memory.
        """

    def row(self, sample: S) -> Row:
        """Return the values of the task's own columns for one sample, as a dict from column to value. The training loop
        adds the other columns of the row, such as `step` and `loss`.
        """

    def warnings(self) -> Iterator[str]:
        """Yield one line for each setting that is valid but rarely intended. The lines are shown to the user."""

    @property
    def expected_loss(self) -> ExpectedLoss | None:
        """Return the loss that the run should start with, or None if it is not known. If it is None, the losses are not
        checked.
        """

    def description(self) -> str:
        """Return one line for the user that says which data the run trains on."""

    def memory_plan(self, start: Checkpoint | None, recorded: bool = False) -> MemoryPlan:
        """Return the plan that fits the run into memory: how many of the last blocks keep their activations, and how
        many tokens a micro-batch may have. `start` is a checkpoint of the run, or None for a new run. If `recorded` is
        False, the setting [train] `memory` decides. If `recorded` is True, the setting counts as "auto". With "auto",
        the plan recorded in `start` is used if it fits. If it does not fit or `start` is None, the fastest plan that
        fits is chosen.

        Every value of the setting but "auto" fixes the number of blocks, whatever `start` has recorded. Raises
        ValueError if the chosen plan does not fit into memory. The message names settings that would fit.
        """

    def initial_adapter(self) -> InitialAdapter | None:
        """Read the adapter file of the setting [train] `initial`. The result holds its arrays by name and the scale of each
        Linear. If the setting is empty, the result is None. Raises ValueError if the adapter does not fit the model.
        """

    def load_model(self) -> Model:
        """Load the frozen model. Its weights are packed (quantised) to the bits of the setting [train] `base_bits`."""


class TrainingContext(Protocol):
    """The services that the training loop needs from the code that runs it: folder, stored rows, file writing and messages. A
    StageContext of `stages.stage` provides all of them.
    """

    @property
    def artifacts(self) -> Path:
        """The folder with the run's checkpoints, results and control files. The loop writes files here only through
        `write_artifact`.
        """

    @property
    def stored(self) -> pa.Table:
        """The rows of the run that are stored already, as an Arrow table."""

    @property
    def pending(self) -> pa.Table:
        """The rows that are wanted but not stored yet. The Arrow table has the columns `step`, `split` and `sample`."""

    @property
    def provenance(self) -> dict[str, str]:
        """Text entries for the header of every adapter file: key -> text. They hold recipe ids and the versions of the
        software. A recipe id is a hash of what decides the result of a stage, such as its settings and its weights.
        """

    @property
    def write_artifact(self) -> Callable[[str, Callable[[Path], None]], Path]:
        """The function `write_artifact(name, write)`. It creates the file `name` in the folder `artifacts` and returns the path
        of the finished file. It calls `write(path)` to write the content. Readers see the whole file or no file.
        """

    @property
    def say(self) -> Callable[[str], None]:
        """The function `say(line)`. It prints one line for the user."""

    @property
    def progress(self) -> Callable[[int, int, str], None]:
        """The function `progress(done, total, unit)`. It updates the progress bar. `done` and `total` count units. `unit` is
        their name, such as "steps".
        """

    @property
    def note(self) -> Callable[[str], None]:
        """Return the function `note(text)`. It shows `text` beside the progress bar, such as the current loss. Each
        text replaces the previous one.
        """

    @property
    def stop(self) -> Callable[[], bool]:
        """The value of this property is a function without arguments. The function returns True once the user has
        requested a stop.
        """

    @property
    def pause(self) -> Callable[[str], None]:
        """The function `pause(reason)`. It tells the user why the run ends before its last step. `reason` is a text.
        The training loop calls `pause` when it is about to end the run early. The function itself neither pauses nor
        ends the run. The run counts as paused because it can be continued later.
        """
