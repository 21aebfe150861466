"""The contracts between stages and the code that runs them: Pipeline, Stage, StageContext, WorkUnit.

All of them are values. A stage computes rows; it never opens a table, the network or the terminal itself. This module
imports nothing large, so that a pipeline's commands can be listed quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from schemas.table import TableSchema


class TensorReader(Protocol):
    """Random access to the tensors of one table, memory-mapped."""

    def read(self, key: str, name: str = "") -> np.ndarray:
        """Return the tensor `name` of the row with that key, in its shape; without a name, the row's first tensor.

        The array is a read-only view of the file and valid until the next call of `ahead`. bfloat16 is returned as uint16 words.
        KeyError for a key that the table does not have.
        """

    def ahead(self, keys: Iterable[str]) -> None:
        """Prefetch the rows with these keys and release the pages of the rows read before."""


@dataclass
class StageContext:
    """Everything that a running stage may use: its settings, its rows, its inputs, and functions to report and to write files."""

    config: Any  # the stage's own section of project.toml
    artifacts: Path  # folder of the files that rows name; write through `write_artifact`
    stored: pa.Table  # rows of this table that exist already, schema `writes.stored`
    pending: pa.Table  # rows of `wants` that do not exist yet
    rows: Callable[[TableSchema], pa.Table]  # rows of a table that the stage reads
    tensors: Callable[[TableSchema], TensorReader]  # tensors of a table that the stage reads
    files: Callable[[TableSchema], Path]  # artifacts folder of a table that the stage reads
    need: Callable[[str], Any]  # the value of a resource named in `Stage.needs`: a path or a model family
    write_artifact: Callable[[str, Callable[[Path], None]], Path]  # (name, write): the file appears whole or not at all
    say: Callable[[str], None]  # one line for the user
    progress: Callable[[int, int, str], None]  # (done, total, unit)
    stop: Callable[[], bool]  # True once the user asked to stop: finish the current batch and return
    pause: Callable[[str], None] = lambda reason: None  # say why `run` returns before all rows are made
    root: Path = Path()  # the project's folder: what a relative path in a setting starts from
    provenance: dict[str, str] = field(default_factory=dict)  # recipe and versions, for the metadata of artifacts


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline, named after the table that it writes: which rows it wants, and the function that computes them.

    `wants` returns the rows that the table should have: the key columns and every input column that a row's freshness
    depends on. It is cheap, loads no weights and writes nothing. A stored row that equals its wanted row in all these
    columns is fresh; the others are pending.
    `run` yields record batches of `writes.batch` for the rows of `ctx.pending`, in small steps.
    `finish` is called once, after the last batch, in the process that commits: for a verdict over all rows (it may
    yield batches) or an artifact made of all of them. `ctx.stored` then holds every row, `ctx.pending` what was pending.
    `redo` returns stored rows to compute again although their inputs are unchanged, such as files that could not be read.
    `snapshot`, for a stage whose rows depend on each other, returns the rows that the whole result depends on; they
    become part of the recipe.
    `divisible`: the pending rows may be divided among work units that run in different processes.
    """

    reads: tuple[TableSchema, ...]
    writes: TableSchema
    config: type
    wants: Callable[[StageContext], pa.Table]
    run: Callable[[StageContext], Iterator[pa.RecordBatch]]
    needs: tuple[str, ...] = ()
    finish: Callable[[StageContext], Iterator[pa.RecordBatch]] | None = None
    redo: Callable[[StageContext], pa.Table] | None = None
    snapshot: Callable[[StageContext], pa.Table] | None = None
    divisible: bool = True
    version: int = 1
    result: str = ""  # the artifact that a user came for, if there is one

    @property
    def name(self) -> str:
        """The name of the stage and of its table."""
        return self.writes.name


# What a stage may need of its project, by name


@dataclass(frozen=True)
class Folder:
    """A folder named by a setting, relative to the project. The stage gets its path."""

    section: str
    key: str


@dataclass(frozen=True)
class Weights:
    """A component of the project's model family. The stage gets the path of its files, which are downloaded if they are missing.

    The sha256 of the files is part of the recipe of every stage that needs them, and so are `fields` of the family's record.
    """

    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class FamilyRecord:
    """The record of the project's model family. The stage gets the record itself."""


Resource = Folder | Weights | FamilyRecord


# What a pipeline adds to the commands that every pipeline has

Row = Mapping[str, Any]
Ask = Callable[..., list[dict[str, Any]]]  # ask(sql, **values): rows of the answer; `$name` in the SQL is a value


@dataclass(frozen=True)
class View:
    """An SQL view over the tables of a pipeline, with a line that says what its rows are."""

    sql: str
    doc: str


@dataclass(frozen=True)
class Panel:
    """A question about a project that is asked often: its name, a title, and the SQL that answers it."""

    name: str
    title: str
    sql: str


@dataclass(frozen=True)
class Chain:
    """How `latentmill follow TEXT` finds one row of the first table and traces it through the others.

    `find(ask, need, text)` returns the rows that match the text best: one row if it is clear, several if it is ambiguous,
    none if nothing matches. `need(name)` is the value of a resource of the pipeline.
    `tell` maps a table, in the order of the story, to a function (ask, row) -> lines about that row of the first table.
    """

    table: str  # the table whose row is found
    label: str  # the column of that table that names a row to the user
    text: str  # what the text may be, as a phrase: "a path or part of a caption"
    find: Callable[[Ask, Callable[[str], Any], str], list[dict[str, Any]]]
    tell: Mapping[str, Callable[[Ask, Row], Iterator[str]]]


@dataclass(frozen=True)
class Option:
    """One option of `latentmill init` for a pipeline, such as `--images FOLDER`.

    `kind` "folder" is a folder that must exist; the template gets its path relative to the new project. "folder or text"
    is treated so if it is a folder. An option whose default is None must be given.
    """

    name: str
    doc: str
    default: str | None = ""
    kind: Literal["text", "folder", "folder or text"] = "text"


@dataclass(frozen=True)
class Template:
    """A new project of a pipeline: the options of `latentmill init`, and a function (values by option) -> text of project.toml.

    The function raises ValueError for a wrong value.
    """

    options: tuple[Option, ...]
    write: Callable[[Mapping[str, str]], str]


@dataclass(frozen=True)
class Pipeline:
    """A chain of stages, and the commands, views, panels and model families that belong to it alone.

    Values that need imports are given as text, "module" or "module:attribute", and imported when they are first used,
    so that a pipeline can be listed without loading any of its code.
    """

    name: str
    doc: str
    stages: Mapping[str, str]  # table -> module whose STAGE writes it, in the order of the chain
    resources: Mapping[str, Resource] = field(default_factory=dict)  # what stages may need, by name
    families: str = ""  # the table of model families, name -> record; empty: the pipeline uses no model
    results: tuple[str, ...] = ()  # tables that `clean` keeps, because a user came for them
    template: str = ""  # a Template: what `latentmill init` asks for and writes
    commands: Mapping[str, str] = field(default_factory=dict)  # command -> a click command; its help is the docstring
    methods: Mapping[str, str] = field(default_factory=dict)  # method of the Python API -> function(project, ...)
    views: Mapping[str, View] = field(default_factory=dict)
    follow: str = ""  # a Chain: how `latentmill follow` traces one input through the tables
    panels: tuple[Panel, ...] = ()

    def stage(self, name: str) -> Stage:
        """Return the stage that writes the table `name`. KeyError if the pipeline has no such table."""
        found: Stage = import_module(self.stages[name]).STAGE
        assert found.name == name, f"{self.stages[name]} writes {found.name}, not {name}"
        return found

    def upstream(self, name: str) -> list[str]:
        """Return the names of all stages whose tables the stage `name` depends on, directly or not, in the order of the chain."""
        needed = {name}
        for other in reversed(list(self.stages)):
            if other in needed:
                needed |= {read.name for read in self.stage(other).reads}
        return [other for other in self.stages if other in needed - {name}]


def load(reference: str) -> Any:
    """Import a module and return one of its attributes; `reference` is "module:attribute"."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


# Work that can run in another process


@dataclass(frozen=True)
class Input:
    """Where a table lies that a work unit reads, and which version of its rows."""

    folder: Path
    version: int


@dataclass(frozen=True)
class WorkUnit:
    """Some pending rows of one stage, with everything needed to compute them, as plain data.

    It can be pickled and computed in any process that sees the same folders (`pipeline.work.perform`). It writes to no
    table: batches and artifacts go back to the runner, which commits them.
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
    """A file that a work unit made: its name below the artifacts folder, and its bytes."""

    name: str
    content: bytes
