"""The contracts between stages and the code that runs them: Stage, StageContext, WorkUnit.

All of them are values. A stage computes rows; it never opens a table, the network or the terminal itself. This module
imports nothing large, so that a pipeline's commands can be listed quickly.
"""

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
    """Read the tensors of one table by the key of a row. `read(key)` returns a tensor as an array. `ahead(keys)` starts
    loading the tensors of several rows. The files are memory-mapped, so values are read from disk only when they are
    used.
    """

    def read(self, key: str, name: str = "") -> np.ndarray:
        """Return one tensor of the row whose key is `key`, in the tensor's shape. `name` is the name of the tensor
        column. If it is empty, the table's first tensor column is read. bfloat16 is returned as uint16 words. The array
        is a read-only view of the file. It becomes invalid at the next call of `ahead`. Raises KeyError if no row has the
        key.
        """

    def ahead(self, keys: Iterable[str]) -> None:
        """Start reading the tensors of the rows with the given keys from disk. The memory of all rows that were read
        before is released. Arrays from earlier calls of `read` become invalid.
        """


@dataclass
class StageContext:
    """Everything that the functions of a running stage may use. It holds the stage's config, the stored and the pending rows
    of its table, and access to the tables that it reads. It also holds functions that write artifacts (files that rows
    name), report to the user, and say if the user asked to stop.
    """

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
    """One stage of a pipeline: the tables that it reads, the table that it writes, and its functions. `reads` and
    `writes` are table schemas. `config` is the dataclass of the stage's settings. `needs` names the resources that the
    project must supply, such as model weights. `wants(ctx)` returns the rows that the table should have. A wanted row
    that is not stored is pending. `run(ctx)` yields record batches for the pending rows. `ctx` is a `StageContext`.

    `wants` returns the key columns and every input column that a row's freshness depends on. It is cheap, loads no weights and
    writes nothing. A stored row that equals its wanted row in all these columns is fresh; the others are pending.

    `run` yields batches of the schema `writes.batch`, in small steps.

    `finish` is called once, after the last batch, in the process that commits: for a decision about all rows (it may yield
    batches) or an artifact made of all of them. `ctx.stored` then holds every row, and `ctx.pending` the rows that were
    pending at the start.

    `optional` holds tables whose artifacts the stage uses if there are any, such as a trained adapter. The newest table is used,
    of whatever settings. It is not built for the stage's sake. What the stage takes from it must be part of a row's key.

    `redo` returns stored rows to compute again although their inputs are unchanged, such as files that could not be read.

    `repair` writes damaged artifacts again that no row names, and yields a line for the user about each.

    `snapshot` is for a stage whose rows depend on each other. It returns the rows that the whole result depends on, and they
    become part of the recipe.

    `forecast(outlook)` returns a `stages.forecast.Forecast`: what the stage needs, computed from shapes. None: it needs little.

    `opens(ctx)` yields the paths of the files, other than tables and weights, that computing `ctx.pending` opens. With None, the
    stage may open every file of the folders that it needs. `ships` is False if rows name such files by full path. Then the files
    cannot be sent to workers on other machines.

    `model(config)` is True if the stage computes with a model, which takes a GPU if there is one. `config` holds the stage's
    settings. With None, the stage does so if it needs weights.

    `divisible` is True if the pending rows may be divided among work units that run in different processes.
    """

    reads: tuple[TableSchema, ...]
    writes: TableSchema
    config: type
    wants: Callable[[StageContext], pa.Table]
    run: Callable[[StageContext], Iterator[pa.RecordBatch]]
    needs: tuple[str, ...] = ()
    optional: tuple[TableSchema, ...] = ()
    finish: Callable[[StageContext], Iterator[pa.RecordBatch]] | None = None
    redo: Callable[[StageContext], pa.Table] | None = None
    repair: Callable[[StageContext], Iterator[str]] | None = None
    snapshot: Callable[[StageContext], pa.Table] | None = None
    forecast: Callable[[Any], Any] | None = None  # stages.forecast: Outlook -> Forecast
    opens: Callable[[StageContext], Iterator[Path]] | None = None
    ships: bool = True
    model: Callable[[Any], bool] | None = None
    divisible: bool = True
    version: int = 1
    result: str = ""  # the artifact that a user came for, if there is one

    @property
    def name(self) -> str:
        """The name of the stage, which is also the name of the table that the stage writes."""
        return self.writes.name


# Work that can run in another process


@dataclass(frozen=True)
class Input:
    """A table that a work unit reads. `folder` is the table's folder on disk. `version` is the number of the table's
    version in Lance. The rows are read as they were at this version, even if the table changes later.
    """

    folder: Path
    version: int


@dataclass(frozen=True)
class WorkUnit:
    """Some pending rows of one stage, with everything that is needed to compute them. The unit holds the config, the
    stored rows, and the places of input tables and weights. It is plain data, so it can be pickled. Any process that sees
    the same folders can compute it with `pipeline.work.perform`. A work unit writes to no table. The runner commits its
    batches and artifacts.
    """

    stage: str  # module whose STAGE computes the rows
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
    """A file that a stage has made, to be stored beside the stage's table. `name` is its path below the table's
    artifacts folder. `content` holds its bytes.
    """

    name: str
    content: bytes
