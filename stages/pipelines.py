"""A pipeline as a value: its stages in order, the resources that they may need, and what it adds to the commands.

This module imports nothing large, so that a pipeline's commands can be listed quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from stages.page import Detail, Page

if TYPE_CHECKING:
    from stages.stage import Stage

# What a stage may need of its project, by name


@dataclass(frozen=True)
class Folder:
    """A resource of a pipeline: a folder that the user names in project.toml. A stage that needs the resource gets the
    folder's full path. `section` is a section of project.toml, such as "images". `key` is the setting in this section
    that holds the path. `key` may also be a property of the section's config class that returns the path.

    A relative path starts at the project's folder. The setting or property may also hold a tuple of several paths. The
    stage then gets the deepest folder that contains all of them.
    """

    section: str
    key: str


@dataclass(frozen=True)
class Weights:
    """A resource of a pipeline: the weights of one component, such as the autoencoder. The component belongs to the
    project's model family. A stage that needs the resource gets the path of the weights, a file or a folder. Missing
    weights are downloaded or generated first.

    `fields` lists fields of the family's record `Family`. It must contain every field that changes what the component
    computes. The values of these fields and the sha256 of the weights are part of a stage's recipe (the hash that names
    its table's folder).
    """

    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class FamilyRecord:
    """Marks a resource of a pipeline as the record of the project's model family. The record is an object of the class
    `Family` or `RetrieverFamily`. The record holds the name, the sizes and the functions of the model. A stage that
    needs the resource gets the record. `FamilyRecord` has no fields. For example, the entry `"family": FamilyRecord()`
    in `Pipeline.resources` says that a stage that needs "family" gets the record.
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
    """An SQL query that belongs to a pipeline. The command `latentmill panel NAME` runs it and shows its rows. `name`
    is the NAME that the user gives. `title` says what the rows show. `sql` is the SELECT statement.
    """

    name: str
    title: str
    sql: str


@dataclass(frozen=True)
class Chain:
    """Describes how the command `latentmill follow TEXT` traces one input, such as an image, through the tables of a
    pipeline. `table` is the table with one row per input. `label` is the column of `table` with the name of the input.
    `text` is a phrase that says what TEXT may be. `find` is a function that returns the rows of `table` that match
    TEXT. `describe` maps the name of a table to a function that yields lines about the input.

    The command calls `find(query, need, TEXT)`, which returns the rows as dicts. If there is no row, or if there are
    several, the command ends with an error. If there is one row, the command calls the functions in `describe` with the
    arguments (query, row). `query(sql, **values)` runs SQL over the tables and returns the rows as dicts. `need(name)`
    returns a resource of the pipeline, such as the path of a folder.
    """

    table: str  # the table whose row is found
    label: str  # the column of that table that names a row to the user
    text: str  # what the text may be, as a phrase: "a path or part of a caption"
    find: Callable[[Query, Callable[[str], Any], str], list[dict[str, Any]]]
    describe: Mapping[str, Callable[[Query, Row], Iterator[str]]]


@dataclass(frozen=True)
class Option:
    """One option of the command `latentmill init`, such as `--images FOLDER`. `doc` is the help text. If `default` is
    None, the user must give the option. `kind` says which values are valid: "text", "folder", "folder or file" or
    "folder or text".

    With "folder", the value must be an existing folder. With "folder or file", the value may also be an existing file.
    With "folder or text", the value may also be any text. The template gets a folder as a path relative to the new
    project. It gets a file as a full path, and a text unchanged. If a folder lies far from the project, its path is
    absolute (see `relative`).
    """

    name: str
    doc: str
    default: str | None = ""
    kind: Literal["text", "folder", "folder or file", "folder or text"] = "text"


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
    """A pipeline: its stages and everything else that belongs to it. `stages` maps each table to the name of the module
    that writes it, in the order in which the stages run. The attribute `STAGE` of that module is the stage. The other
    fields hold resources, commands, SQL views, panels, pages and model families. Many fields name an object by a text,
    "module" or "module:attribute". The object is imported when it is first used.
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
        """Return the names of all stages that must run before the stage `name`. These stages write the tables that
        `name` reads, directly or through further stages. The names are in the order in which the stages run. The stage
        `name` itself is left out.
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
