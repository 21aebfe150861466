"""Run: what the functions of a stage get, in the runner, a Ray worker, a rank, a test and an experiment in memory alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from schemas.table import Among, TableSchema

Config = TypeVar("Config")  # a stage's section of project.toml
T = TypeVar("T")


class Problems(ValueError):  # noqa: N818  (several errors)
    """Mistakes in several of the user's files, found all at once: one line each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__(f"{lines[0]}; and {len(lines) - 1} more: latentmill lint lists them" if lines[1:] else lines[0])
        self.lines = lines


class TensorReader(Protocol):
    """The tensors of one table by row key, memory-mapped."""

    def read(self, key: str, name: str = "") -> np.ndarray:
        """A read-only view, valid until the next `ahead`; bfloat16 comes as uint16 words. `name`: by default the first tensor."""

    def ahead(self, keys: Iterable[str]) -> None:
        """Start reading these rows from disk, and release what was read before."""


class Inputs(Protocol):
    """The tables that a stage reads."""

    def rows(self, schema: TableSchema, columns: Sequence[str] = (), among: Among | None = None) -> pa.Table:
        """With these columns or all; those `among` some, or all. ValueError: the table is not built."""

    def tensors(self, schema: TableSchema) -> TensorReader: ...

    def files(self, schema: TableSchema) -> Path:
        """The folder of a table's artifacts. That of an optional table may not exist."""

    def intact(self, schema: TableSchema, name: str) -> bool:
        """Does an artifact, also of the stage's own table, have the bytes that were written?"""


def _refuse(name: str, write: Callable[[Path], None]) -> Path:
    raise AssertionError(f"{name}: only a run that commits writes artifacts")


@dataclass
class Output:
    """The stage's own table."""

    artifacts: Path  # folder of the files that rows name; only read, new ones appear through `write`
    stored: pa.Table  # rows that exist already, schema `writes.stored`
    pending: pa.Table  # rows of `wants` that do not exist yet
    write: Callable[[str, Callable[[Path], None]], Path] = _refuse  # (name, write): the artifact appears whole or not at all
    provenance: Mapping[str, str] = field(default_factory=dict)  # recipe and versions, for the metadata of artifacts


@dataclass
class Report:
    """How a stage speaks to the user, and learns that it should stop."""

    say: Callable[[str], None] = lambda line: None  # one line
    note: Callable[[str], None] = lambda text: None  # facts beside the progress, such as the loss; each replaces the one before
    progress: Callable[[int, int, str], None] = lambda done, total, unit: None
    stop: Callable[[], bool] = lambda: False  # the user asked to stop: finish the current batch and return
    pause: Callable[[str], None] = lambda reason: None  # say why `run` returns before all rows are made

    def batches(self, items: Sequence[T], size: int, unit: str) -> Iterator[Sequence[T]]:
        """At most `size` items at a time, until the user stops. The progress is reported when the next ones are asked for."""
        for start in range(0, len(items), size):
            if self.stop():
                return
            some = items[start : start + size]
            yield some
            self.progress(start + len(some), len(items), unit)


@dataclass
class Run(Generic[Config]):
    """One run of a stage."""

    config: Config
    inputs: Inputs
    output: Output
    needs: Mapping[str, Any]  # a path or a model family, by the names of `Stage.needs`
    report: Report = field(default_factory=Report)
    root: Path = Path()  # the project's folder: what a relative path in a setting starts from
    reuse: Callable[[str, Callable[[], Any]], Any] = lambda name, load: load()  # a model, which may stay in memory
    known: dict[Any, Any] = field(default_factory=dict)  # results of `once`, also of earlier runs on the same inputs

    def once(self, compute: Callable[[Run[Config]], T]) -> T:
        """`compute(self)`, once for snapshot, wants, run and finish: of config, inputs, needs, root, not the stage's own rows."""
        if compute not in self.known:
            self.known[compute] = compute(self)
        found: T = self.known[compute]
        return found
