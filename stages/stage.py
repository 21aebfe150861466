"""The contracts between stages and the code that runs them. A stage computes rows; it opens no table, network or terminal."""

# Imports nothing large, so that a pipeline's commands are listed quickly.
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from schemas.table import TableSchema


class TensorReader(Protocol):
    """The tensors of one table, memory-mapped."""

    def read(self, key: str, name: str = "") -> np.ndarray:
        """A read-only view, valid until the next `ahead`; bfloat16 as uint16. No `name`: the first tensor column. Raises
        KeyError.
        """

    def ahead(self, keys: Iterable[str]) -> None:
        """Start reading these rows from disk, and release all rows read before."""


@dataclass
class StageContext:
    """What the functions of a running stage may use."""

    config: Any  # the stage's own section of project.toml
    artifacts: Path  # folder of the files that rows name; write through `write_artifact`
    stored: pa.Table  # rows of this table that exist already, schema `writes.stored`
    pending: pa.Table  # rows of `wants` that do not exist yet
    rows: Callable[[TableSchema], pa.Table]  # rows of a table that the stage reads
    tensors: Callable[[TableSchema], TensorReader]  # tensors of a table that the stage reads
    files: Callable[[TableSchema], Path]  # artifacts folder of a table that the stage reads; an optional one may not exist
    need: Callable[[str], Any]  # the value of a resource named in `Stage.needs`: a path or a model family
    write_artifact: Callable[[str, Callable[[Path], None]], Path]  # (name, write): the file appears whole or not at all
    say: Callable[[str], None]  # one line for the user
    progress: Callable[[int, int, str], None]  # (done, total, unit)
    stop: Callable[[], bool]  # True once the user asked to stop: finish the current batch and return
    reuse: Callable[[str, Callable[[], Any]], Any] = lambda name, load: load()  # a model, which may stay in memory
    note: Callable[[str], None] = lambda text: None  # facts beside the progress, such as the loss; each replaces the one before
    pause: Callable[[str], None] = lambda reason: None  # say why `run` returns before all rows are made
    root: Path = Path()  # the project's folder: what a relative path in a setting starts from
    provenance: dict[str, str] = field(default_factory=dict)  # recipe and versions, for the metadata of artifacts
    intact: Callable[[TableSchema, str], bool] = lambda *_: True  # has an artifact of a table the bytes that were written?


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline. A wanted row that is not stored is pending."""

    reads: tuple[TableSchema, ...]
    writes: TableSchema
    config: type  # the dataclass of its section in project.toml
    # The rows that the table should have: the key columns and every input column that a row's freshness depends on. A stored
    # row that equals its wanted row in all these columns is fresh; the others are pending. It is cheap: it loads no weights and
    # writes nothing.
    wants: Callable[[StageContext], pa.Table]
    run: Callable[[StageContext], Iterator[pa.RecordBatch]]  # the pending rows, in small batches of the schema `writes.batch`
    needs: tuple[str, ...] = ()  # resources of the project, such as weights
    # Tables whose artifacts the stage uses if there are any, such as a trained adapter: the newest of whatever settings. They are
    # not built for the stage's sake. What the stage takes from them must be part of a row's key.
    optional: tuple[TableSchema, ...] = ()
    # Called once after the last batch, in the process that commits: for a decision about all rows (it may yield batches) or an
    # artifact made of all of them. `ctx.stored` then holds every row, `ctx.pending` those that were pending at the start.
    finish: Callable[[StageContext], Iterator[pa.RecordBatch]] | None = None
    # Stored rows to compute again although their inputs are unchanged, such as files that could not be read.
    redo: Callable[[StageContext], pa.Table] | None = None
    # Writes damaged artifacts again that no row names; yields a line for the user about each.
    repair: Callable[[StageContext], Iterator[str]] | None = None
    # For a stage whose rows depend on each other: the rows that the whole result depends on. They become part of the recipe.
    snapshot: Callable[[StageContext], pa.Table] | None = None
    forecast: Callable[[Any], Any] | None = None  # stages.forecast: Outlook -> Forecast; None: it needs little
    # The files, other than tables and weights, that computing `ctx.pending` opens. None: any file of the folders in `needs`.
    opens: Callable[[StageContext], Iterator[Path]] | None = None
    ships: bool = True  # False: rows name such files by full path, so they cannot be sent to workers on other machines
    # Whether the stage computes with a model, which takes a GPU if there is one, by its config. None: if it needs weights.
    model: Callable[[Any], bool] | None = None
    divisible: bool = True  # pending rows may be divided among work units in different processes
    version: int = 1
    result: str = ""  # the artifact that a user came for, if there is one

    @property
    def name(self) -> str:
        return self.writes.name


# Work that can run in another process


@dataclass(frozen=True)
class Input:
    """A table that a work unit reads, as it was at one version of Lance."""

    folder: Path  # of the table
    version: int  # of the table in Lance: later rows are not read


@dataclass(frozen=True)
class WorkUnit:
    """Pending rows and all that computing them needs, as plain data: any process that sees the same folders can do it."""

    stage: str  # module whose STAGE computes the rows, by `pipeline.work.perform`; the runner commits what it makes
    config: Any
    pending: pa.Table
    stored: pa.Table  # the stored rows that have the keys of `pending`
    inputs: Mapping[str, Input]  # by table
    needs: Mapping[str, Any]  # values of the resources in `Stage.needs`
    artifacts: Path  # the table's artifacts folder, only read
    root: Path
    provenance: Mapping[str, str]


@dataclass(frozen=True)
class Artifact:
    """A file that a stage has made, to be stored beside its table."""

    name: str  # path below the table's artifacts folder
    content: bytes
