"""What a stage is, and what it is given. A stage is a value; the runner owns disk, progress bar and commits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from schemas.table import TableSchema


class TensorReader(Protocol):
    """Random access to the tensors of one table, memory-mapped."""

    def read(self, key: str) -> np.ndarray:
        """The tensor of that row in its shape, uint16 words; a view that holds until the next `ahead`. One copy: `mx.array`."""

    def ahead(self, keys: Iterable[str]) -> None:
        """Say which rows come next: their pages are asked for, those read before are let go."""


@dataclass
class StageContext:
    """What a stage may use. Tables and tensors in memory will do as well, which is how stages are tested."""

    config: Any  # the stage's own section, its `config` dataclass
    family: Any  # stages.models.families.Family
    source: Path  # the image folder; never written
    artifacts: Path  # the folder for files that rows name; write through `write_artifact`
    stored: pa.Table  # rows of this table that exist already, as last written
    pending: pa.Table  # the rows of `wants` that do not exist yet
    rows: Callable[[TableSchema], pa.Table]  # the rows of a table that the stage reads
    tensors: Callable[[TableSchema], TensorReader]  # and their tensors
    weights: Callable[[str], Path]  # where a component's weights lie: a folder or a file
    write_artifact: Callable[
        [str, Callable[[Path], None]], Path
    ]  # write_artifact(name, write): an artifact, written whole or not at all
    say: Callable[[str], None]  # one line for the user
    progress: Callable[[int, int, str], None]  # done, total, unit: moves the bar
    stop: Callable[[], bool]  # True once the user asked to stop: finish the batch and return
    pause: Callable[[str], None] = lambda reason: None  # say that `run` returns early, and why: no mistake, and no interrupt
    root: Path = Path()  # what a relative path in a setting starts from
    provenance: dict[str, str] = dataclasses.field(default_factory=dict)  # recipe, versions: for a file's metadata


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline, named after the table that it writes.

    `wants` says which rows the table should have: the key columns and every input that a row's freshness depends on
    (a subset of the columns of `writes`); it is cheap, loads no weights and writes nothing. A stored row that agrees
    with its wanted row in all those columns is fresh. `run` yields batches of `writes.batch` for `ctx.pending`,
    in small steps, and loads weights only if something is pending. `snapshot`, for a stage that is not row-wise,
    returns the rows that the whole result depends on: they become part of the recipe.
    """

    reads: tuple[TableSchema, ...]
    writes: TableSchema
    config: type
    wants: Callable[[StageContext], pa.Table]
    run: Callable[[StageContext], Iterator[pa.RecordBatch]]
    loads: tuple[str, ...] = ()
    snapshot: Callable[[StageContext], pa.Table] | None = None
    version: int = 1
    result: str = ""  # the artifact that a user came for, if there is one

    @property
    def name(self) -> str:
        """The stage_name."""
        return self.writes.name


def setting(default: Any, doc: str) -> Any:
    """A knob that changes what a row's value is: part of the recipe. `doc` gives the unit and the reason of the default."""
    return _field(default, doc, "setting")


def selects(default: Any, doc: str) -> Any:
    """A knob that changes which rows exist, not what any of them is: seen by `wants`, not part of the recipe."""
    return _field(default, doc, "selects")


def runtime(default: Any, doc: str) -> Any:
    """A knob that changes no row: batch size, workers, how often to save."""
    return _field(default, doc, "runtime")


def _field(default: Any, doc: str, kind: str) -> Any:
    metadata = {"doc": doc, "kind": kind}
    if isinstance(default, list | dict | set):
        raise TypeError("a default must be immutable: use a tuple")
    return dataclasses.field(default=default, metadata=metadata)
