"""What a kind of training implements for the loop. A task knows its tables and its model; the loop knows neither."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import mlx.core as mx
import pyarrow as pa

from stages.tuner.adapters.targets import Target
from stages.tuner.blockwise.backprop import Chain, Loss
from stages.tuner.config import TrainingConfig
from stages.tuner.weights import Arrays

if TYPE_CHECKING:
    from stages.tuner.memory import Estimator

Row = dict[str, Any]
Masks = Callable[[Sequence[Target]], Mapping[str, mx.array]]  # Linear -> (samples, R), the factor of each rank
InitialAdapter = tuple[Arrays, dict[str, float]]  # arrays by "<linear><ending>", float32; the scale of each Linear

S = TypeVar("S")  # a sample, before anything of it is read
M = TypeVar("M", bound="MicroBatch")
M_contra = TypeVar("M_contra", bound="MicroBatch", contravariant=True)
M_co = TypeVar("M_co", bound="MicroBatch", covariant=True)


class MicroBatch(Protocol):
    @property
    def samples(self) -> Sequence[Any]:
        """In order."""

    @property
    def tokens(self) -> int:
        """Tokens of one sample, padding included; equal for all of them."""

    def select(self, start: int, stop: int) -> Self:
        """The samples start:stop."""


class Model(Chain, Protocol):
    @property
    def dtype(self) -> mx.Dtype:
        """What the model computes in."""

    def linears(self) -> dict[str, tuple[int, int]]:
        """Name -> (outputs, inputs) of every Linear that can get an adapter."""


@dataclass(frozen=True)
class Division:
    """How a loss term of a batch is computed in parts, of which only one at a time keeps its activations."""

    parts: Callable[[int], Sequence[Mapping[str, Any]]]  # (most samples of a part) -> keyword arguments of `enter`, per part
    join: Callable[[list[Any]], Any]  # predictions of the parts -> that of the batch


@dataclass(frozen=True)
class Term:
    """One term of the loss of a micro-batch. Training minimises the mean of its values over a step.

    Arrays that `loss` uses must be bound by keyword (`functools.partial(f, name=array)`): arguments of the compiled graph.
    """

    inputs: Mapping[str, Any]  # keyword arguments of `model.enter`
    loss: Loss  # prediction -> float32 per sample, or a dict of columns, of which only "loss" is minimised
    column: str = "loss"  # of the table
    applies: Sequence[bool] | None = None  # which samples have the term; None: all
    names: Mapping[str, Sequence[str]] | None = None  # column -> texts that its values index; a negative index is null
    division: Division | None = None  # what an objective that is not separable needs to be divided
    strength: float = 1.0  # factor of the adapter in this prediction
    masks: Masks | None = None  # None: every sample has the whole adapter


@dataclass(frozen=True)
class ExpectedLoss:
    """What the first losses should be, relative to the losses of a model that knows nothing about the data."""

    uninformed: Callable[[Row], float | None]  # loss of that model for a row's sample; None: unknown
    nobody: str  # names that model in a warning: "a model that knows nothing about pictures"
    start: tuple[float, float]  # (smallest, largest) ratio
    source: str  # where `start` is from
    remedy: str  # what to check if the ratio is outside


class Objective(Protocol[M_contra]):
    @property
    def separable(self) -> bool:
        """True if a sample's loss does not depend on the others of its batch. A contrastive loss is not separable."""

    def terms(self, model: Any, batch: M_contra) -> Iterator[Term]:
        """The terms of the loss, one at a time. The first is the main loss, which every sample has."""

    def validation_term(self, model: Any, batch: M_contra) -> Term:
        """What a measurement of held-out samples reports; never minimised."""


class Reader(Protocol[S, M_co]):
    def prefetch(self, samples: Iterable[S]) -> None:
        """Start reading all samples of the next step. Data of earlier calls may be released."""

    def read(self, step: int, samples: list[S]) -> M_co:
        """The samples of a step (from 1) as one micro-batch. Called in a background thread."""


class HeldOut(Protocol[M_co]):
    @property
    def count(self) -> int:
        """Samples of a measurement."""

    def micro_batches(self) -> Iterator[M_co]:
        """All held-out samples, in the one order that every measurement uses."""


class Task(Protocol[S, M]):
    @property
    def config(self) -> TrainingConfig:
        """[train]."""

    @property
    def objective(self) -> Objective[M]:
        """The loss."""

    @property
    def held_out(self) -> HeldOut[M] | None:
        """None without [train.validation]."""

    @property
    def schema(self) -> pa.Schema:
        """Of the table. The loop fills step, split, sample, loss, lr, grad_norm, (read_)seconds, peak_bytes; `row` the rest."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Entries for the header of every adapter file, beside the loop's own."""

    def sizes(self, step: int) -> list[int]:
        """Samples in each batch of a step (from 1). Must be fast: it is called for every step of the run."""

    def draw(self, step: int) -> list[list[S]]:
        """The samples of a step (from 1), one list per micro-batch. A function of the seed and the step alone."""

    def reader(self) -> Reader[S, M]:
        """A new reader, its files open."""

    def row(self, sample: S) -> Row:
        """The task's own columns for a sample."""

    def warnings(self) -> Iterator[str]:
        """Lines about settings that are valid but rarely intended."""

    @property
    def expected_loss(self) -> ExpectedLoss | None:
        """None: the losses are not checked."""

    def description(self) -> str:
        """One line: which data the run trains on."""

    def estimator(self) -> Estimator[Any]:
        """What memory the largest batch takes."""

    def initial_adapter(self) -> InitialAdapter | None:
        """The adapter [train] `initial`; None if unset. Raises ValueError if it does not fit the model."""

    def load_model(self) -> Model:
        """The frozen model, packed to [train] `base_bits`."""
