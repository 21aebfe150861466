"""The contracts between stages and the code that runs them. A stage computes rows; it opens no table, network or terminal."""

# Imports nothing large, so that a pipeline's commands are listed quickly.
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from schemas.table import TableSchema
    from stages.memory import Forecast, Outlook
    from stages.run import Run
    from stages.settings import Section


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline. A wanted row that is not stored is pending."""

    reads: tuple[TableSchema, ...]
    writes: TableSchema
    config: type[Section]  # its section of project.toml
    # The rows that the table should have: the key columns and every input column that a row's freshness depends on. A stored
    # row that equals its wanted row in all these columns is fresh; the others are pending. It is cheap: it loads no weights and
    # writes nothing.
    wants: Callable[[Run[Any]], pa.Table]
    run: Callable[[Run[Any]], Iterator[pa.RecordBatch]]  # the pending rows, in small batches of the schema `writes.batch`
    needs: tuple[str, ...] = ()  # resources of the project, such as weights
    # Of `needs`, those that come of the family that the setting `family` of the stage's section names, if it names one: the
    # project's family or one that is distilled from it. The setting `weights` then says where they lie.
    drawn_by: tuple[str, ...] = ()
    # Tables whose artifacts the stage uses if there are any, such as a trained adapter: the newest of whatever settings. They are
    # not built for the stage's sake. What the stage takes from them must be part of a row's key.
    optional: tuple[TableSchema, ...] = ()
    # Called once after the last batch, in the process that commits: for a decision about all rows (it may yield batches) or an
    # artifact made of all of them. `run.output.stored` then holds every row, `pending` those that were
    # pending at the start.
    finish: Callable[[Run[Any]], Iterator[pa.RecordBatch]] | None = None
    # Stored rows to compute again although their inputs are unchanged, such as files that could not be read.
    redo: Callable[[Run[Any]], pa.Table] | None = None
    # For a stage that can take rows back from its artifacts, or repeats stored ones: of the wanted rows (the argument), those
    # that it computes. Cheap: it compares sizes of files, not their bytes. None: the pending ones.
    computes: Callable[[Run[Any], pa.Table], pa.Table] | None = None
    # Writes damaged artifacts again that no row names; yields a line for the user about each.
    repair: Callable[[Run[Any]], Iterator[str]] | None = None
    # For a stage whose rows depend on each other: the rows that the whole result depends on. They become part of the recipe.
    snapshot: Callable[[Run[Any]], pa.Table] | None = None
    # What decides all rows and is neither table, weights nor setting: the content of files that settings name. It becomes part
    # of the recipe if there is any.
    content: Callable[[Run[Any]], Mapping[str, Any]] | None = None
    forecast: Callable[[Outlook], Forecast | None] | None = None  # None: it needs little
    # The rows that its table will have after a run, as far as later stages count them: cheap, writes nothing. None: they are not
    # known before it has run.
    foresee: Callable[[Run[Any]], pa.Table] | None = None
    # The files, other than tables and weights, that computing the pending rows opens. None: any file of the folders in `needs`.
    opens: Callable[[Run[Any]], Iterator[Path]] | None = None
    ships: bool = True  # False: rows name such files by full path, so they cannot be sent to workers on other machines
    # Whether the stage computes with a model, which takes a GPU if there is one, by its config. None: if it needs weights.
    model: Callable[[Any], bool] | None = None
    divisible: bool = True  # pending rows may be divided among work units in different processes
    version: int = 1  # raised when the code starts to mean something else: another recipe, so another table
    result: str = ""  # the artifact that a user came for, if there is one
    unit: str = "row"  # for the user, what a row is; a stage that trains counts steps

    @property
    def name(self) -> str:
        return self.writes.name


# Work that can run in another process


@dataclass(frozen=True)
class Input:
    """A table that a work unit reads."""

    folder: Path  # of the table
    version: int | None = None  # of the table in Lance: later rows are not read; None: all that readers see
    rows: pa.Table | None = None  # a table in memory, tensors included, instead of the rows in `folder`
    current: bool = True  # False: an optional table of other settings, whose artifacts are used and whose rows are not


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

    def write(self, path: Path) -> None:
        path.write_bytes(self.content)
