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

from stages.page import Detail, Page

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
    divisible: bool = True
    version: int = 1
    result: str = ""  # the artifact that a user came for, if there is one

    @property
    def name(self) -> str:
        """The name of the stage, which is also the name of the table that the stage writes."""
        return self.writes.name


# What a stage may need of its project, by name


@dataclass(frozen=True)
class Folder:
    """A resource of a pipeline: a folder that the user names in project.toml. `section` and `key` say which setting
    holds the folder's path. A relative path starts at the project's folder. A stage that needs the resource gets the
    full path.
    """

    section: str
    key: str


@dataclass(frozen=True)
class Weights:
    """A resource of a pipeline: the weights of one component of the project's model family. A component is, for
    example, the autoencoder. A stage that needs the resource gets the path of the weights, a file or a folder. Missing
    weights are downloaded or generated first. `fields` names fields of the family's record `Family`. List every field
    that changes what the component computes.

    The values of `fields` and the sha256 of the weights are part of a stage's recipe (the hash that names its table's
    folder).
    """

    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class FamilyRecord:
    """A resource of a pipeline: the record of the project's model family. A stage that needs the resource gets a
    `Family`.
    """


Resource = Folder | Weights | FamilyRecord


# What a pipeline adds to the commands that every pipeline has

Row = Mapping[str, Any]
Query = Callable[..., list[dict[str, Any]]]  # query(sql, **values) -> rows as dicts; `$name` in the SQL stands for values["name"]


@dataclass(frozen=True)
class View:
    """An SQL view over the tables of a pipeline. `sql` is its SELECT statement. `doc` is one line that says what its rows
    are.

    `needs` names the tables without which the view has no meaning: a query over it is refused until they are built.
    """

    sql: str
    doc: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Panel:
    """A stored question about a project, for `latentmill panel NAME`. It has a `name` and a `title`. `sql` is the SELECT
    statement that answers it.
    """

    name: str
    title: str
    sql: str


@dataclass(frozen=True)
class Chain:
    """Describe how the command `latentmill follow TEXT` traces one input through a pipeline's tables. TEXT is looked up
    in `table`. `label` is the column of `table` that names a row to the user. `text` tells the user what TEXT may be.
    `find(query, need, text)` returns the best matching rows of `table` as a list of dicts. Several rows mean that TEXT
    is ambiguous. `describe` maps a table to a function `(query, row)`. The function yields the lines of text that the
    command prints about this table. `row` is the row that was found.

    `query(sql, **values)` runs SQL and returns rows as dicts. `need(name)` returns a resource of the pipeline.
    """

    table: str  # the table whose row is found
    label: str  # the column of that table that names a row to the user
    text: str  # what the text may be, as a phrase: "a path or part of a caption"
    find: Callable[[Query, Callable[[str], Any], str], list[dict[str, Any]]]
    describe: Mapping[str, Callable[[Query, Row], Iterator[str]]]


@dataclass(frozen=True)
class Option:
    """One option of `latentmill init` for a pipeline, such as `--images FOLDER`. `doc` is the help text. An option whose
    `default` is None must be given. If `kind` is "folder", the value must be an existing folder. The template then gets
    its path relative to the new project. If `kind` is "folder or text", a value that is not a folder is passed on as
    text.
    """

    name: str
    doc: str
    default: str | None = ""
    kind: Literal["text", "folder", "folder or text"] = "text"


@dataclass(frozen=True)
class Template:
    """Describe how the command `latentmill init` makes a new project of a pipeline. `options` are the command's
    options. `write(values)` returns the text of the new project.toml. `values` maps the name of each option to its
    value, a text. `write` raises ValueError if a value is wrong.
    """

    options: tuple[Option, ...]
    write: Callable[[Mapping[str, str]], str]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline: its stages in order, and everything else that belongs to it. `stages` maps the name of each table to
    the module that writes it. The module's `STAGE` is the stage. The other fields hold resources, commands, SQL views,
    panels, pages and model families. Many fields name an object as "module" or "module:attribute". It is imported on
    first use.
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
    tables: Mapping[str, str] = field(default_factory=dict)  # tables that a command writes, not a stage -> their TableSchema
    views: Mapping[str, View] = field(default_factory=dict)
    follow: str = ""  # a Chain: how `latentmill follow` traces one input through the tables
    panels: tuple[Panel, ...] = ()
    capacity: str = ""  # function(bytes) -> rows of text: what fits into so much memory, the heading first
    pages: tuple[Page, ...] = ()  # pages of `latentmill view`, besides the overview, the curves of training and SQL
    detail: Detail | None = None  # the page about one input
    thumbnail: str = ""  # function(path, longest side in pixels) -> a WebP picture, for the page
    side_by_side: str = ""  # function(runs, rows, out): writes the results of several runs into one file; returns out or None
    ranking: Panel | None = None  # SQL with the columns adapter_id and score, the higher the better; `title` names the score

    def stage(self, name: str) -> Stage:
        """Return the stage that writes the table called `name`. Its module is imported if needed. Raises KeyError if no
        stage of the pipeline writes such a table.
        """
        found: Stage = import_module(self.stages[name]).STAGE
        assert found.name == name, f"{self.stages[name]} writes {found.name}, not {name}"
        return found

    def upstream(self, name: str) -> list[str]:
        """Return the names of all stages that must run before the stage called `name`. They write the tables that `name`
        reads, directly or through other stages. The names are in the order of the chain. `name` itself is left out.
        """
        needed = {name}
        for other in reversed(list(self.stages)):
            if other in needed:
                needed |= {read.name for read in self.stage(other).reads}
        return [other for other in self.stages if other in needed - {name}]


def load(reference: str) -> Any:
    """Import a module and return one of its attributes. `reference` has the form "module:attribute"."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


# Work that can run in another process


@dataclass(frozen=True)
class Input:
    """A table that a work unit reads. `folder` is the table's folder on disk. `version` is the version of its rows to
    read.
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
    """A file that a work unit has written, on its way to the runner. `name` is its path below the table's artifacts
    folder. `content` holds its bytes.
    """

    name: str
    content: bytes
