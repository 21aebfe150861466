"""A pipeline as a value: its stages in order, the resources that they may need, and what commands ask about it."""

# Imports nothing large, so that a pipeline's commands are listed quickly.
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from stages.stage import Stage


# What a stage may need of its project, by name


@dataclass(frozen=True)
class Folder:
    """A resource: the full path of a folder that the user names. Of several paths, the deepest folder that contains all."""

    section: str  # of project.toml, such as "images"
    key: str  # a setting or property of the section: a path or a tuple of paths, which start at the project's folder


@dataclass(frozen=True)
class Weights:
    """A resource: the path of a component's weights of the project's family, downloaded or generated if they are missing."""

    # All fields of `Family` that change what the component computes. They are part of the recipe, beside the weights' sha256.
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class FamilyRecord:
    """A resource: the `Family` or `RetrieverFamily` of the project."""


Resource = Folder | Weights | FamilyRecord


# What a pipeline adds to the commands that every pipeline has

Row = Mapping[str, Any]
Query = Callable[..., list[dict[str, Any]]]  # query(sql, **values) -> rows as dicts; `$name` in the SQL stands for values["name"]


@dataclass(frozen=True)
class View:
    sql: str
    doc: str  # one line: what its rows are
    needs: tuple[str, ...] = ()  # tables; until they are built, a query over the view is refused


@dataclass(frozen=True)
class Panel:
    name: str  # NAME of `latentmill panel NAME`
    title: str
    sql: str


@dataclass(frozen=True)
class Chain:
    """How `latentmill follow TEXT` traces one input through the tables. `find` must find exactly one row."""

    table: str  # the table whose row is found
    label: str  # the column of that table that names a row to the user
    text: str  # what the text may be, as a phrase: "a path or part of a caption"
    # find(query, need, TEXT) -> the matching rows of `table`; need(name) returns a resource of the pipeline
    find: Callable[[Query, Callable[[str], Any], str], list[dict[str, Any]]]
    describe: Mapping[str, Callable[[Query, Row], Iterator[str]]]  # table -> (query, row) -> lines about the input


@dataclass(frozen=True)
class Option:
    """An option of `latentmill init`."""

    name: str
    doc: str
    default: str | None = ""  # None: the user must give it
    # The value is a text, or an existing folder or file. The template gets a folder relative to the new project, unless it
    # lies far from it, a file as a full path, and a text unchanged.
    kind: Literal["text", "folder", "folder or file", "folder or text"] = "text"


@dataclass(frozen=True)
class Template:
    options: tuple[Option, ...]
    write: Callable[[Mapping[str, str]], str]  # option -> value, and "project": its folder; returns project.toml
    told: Callable[[Mapping[str, str]], list[str]] = lambda options: []  # lines for the user: what the folders hold


# Pages of `latentmill view`: blocks, each answered by SQL over the project's tables
#
# A picture is named in SQL by the text "SOURCE/PATH". SOURCE is a folder that the pipeline declares as a resource, or the name
# of a table; then PATH begins with the recipe of the table's folder.


@dataclass(frozen=True)
class Chart:
    title: str
    sql: str  # columns series (the name of a curve), x, y; in the order of x
    x_title: str = "step"  # with the unit
    y_title: str = ""
    log: bool = False  # the y axis


@dataclass(frozen=True)
class Listing:
    title: str
    sql: str  # a column `picture` is shown as a small image


@dataclass(frozen=True)
class Cards:
    title: str
    sql: str  # a row is a card; columns picture, name, text and what the rest uses
    filters: Mapping[str, str] = field(default_factory=dict)  # name -> SQL condition
    orders: Mapping[str, str] = field(default_factory=dict)  # name -> SQL of `order by`; the first is the default
    searched: str = ""  # SQL of the text to search in; empty: no search


@dataclass(frozen=True)
class Sheet:
    """A table of pictures with a slider over training steps: a cell shows its newest picture up to the step, else its first."""

    title: str
    sql: str  # a row is a picture; columns row and column (headings), step, picture


@dataclass(frozen=True)
class Editor:
    """A list of texts that the user may edit. Functions are given as "module:function"."""

    title: str
    sql: str  # columns key, name, text, picture, edited, suggestion (another text or null)
    write: str  # write(project_folder, {key: new text, None to undo}); ValueError for a text that cannot be used
    read: str  # read(project_folder) -> all edits, key -> text
    note: str = ""  # for the user: what an edit does
    stage: str = ""  # whose Run the next four get
    present: str = ""  # key -> text as the stage would make it now, without edits
    doubts: str = ""  # key -> words beside the name, of edits that may be out of date
    write_files: str = ""  # writes all edits into files of the user and returns a sentence for the user
    undo_files: str = ""  # takes that back
    written: str = ""  # written(project_folder): true if there is something to take back


@dataclass(frozen=True)
class Field:
    """An input of a Form."""

    option: str  # of the command, such as "--seed"; "": its argument
    label: str
    default: str = ""
    choices: tuple[str, ...] = ()  # empty: any text
    wanted: bool = False  # may not be left empty
    pictures: str = ""  # a folder that the pipeline declares as a resource: names in it, one a line, each an option
    of: Callable[[Any], bool] = lambda family: True  # whether it is asked for in projects of a family

    @property
    def name(self) -> str:
        """In the page's form."""
        return self.option or "argument"


@dataclass(frozen=True)
class Form:
    """What the user fills in becomes a job of the queue: `latentmill COMMAND` with the options that are not empty."""

    title: str
    command: str  # with the options that it always has
    button: str
    fields: tuple[Field, ...]
    note: str = ""
    folder: str = ""  # of the project, whose files are offered as downloads


Block = Chart | Listing | Cards | Sheet | Editor | Form


@dataclass(frozen=True)
class Page:
    name: str  # in the address
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Detail:
    """The page about one input, whose key is `$text` in the queries."""

    sql: str  # one row: picture, width, height
    boxes: str = ""  # rectangles over the picture: label, x, y, width, height; pixels
    masks: str = ""  # grey pictures: label, columns (pixels per row), values (bytes, row by row)
    draw_mask: str = ""  # "module:function" of (columns, values) -> WebP bytes
    cards: str = ""  # the page that has it among its cards, which have the column `key`: those before and after it
    texts: str = ""  # the page that edits its texts, which have its picture
    rate: str = ""  # a setting, key -> how often per epoch it is trained on; `sql` has the column trained, whether it is at all


@dataclass(frozen=True)
class Pipeline:
    """Objects are named by "module" or "module:attribute" and imported when first used."""

    name: str
    doc: str
    stages: Mapping[str, str]  # table -> module whose STAGE writes it, in the order of the chain
    resources: Mapping[str, Resource] = field(default_factory=dict)  # what stages may need, by name
    families: str = ""  # the table of model families, name -> record; empty: the pipeline uses no model
    # Optional inputs of stages that are brought up to date before them: "always", or if project.toml has this section.
    first: Mapping[str, str] = field(default_factory=dict)
    results: tuple[str, ...] = ()  # tables that `clean` keeps, because a user came for them; the main one first
    tables: Mapping[str, str] = field(default_factory=dict)  # tables that a command writes, not a stage -> their TableSchema
    views: Mapping[str, View] = field(default_factory=dict)
    null_if_empty: tuple[str, ...] = ()  # columns in which SQL finds NULL for "", so that rows without a value do not join
    follow: str = ""  # a Chain: how `latentmill follow` traces one input through the tables
    panels: tuple[Panel, ...] = ()
    capacity: str = ""  # function(bytes) -> rows of text: what fits into so much memory, the heading first
    basic: tuple[str, ...] = ()  # the settings that a user meets first, such as "train.steps"
    models: str = ""  # function(bytes) -> the a row per family that `init` may begin with: name, title, licence, bytes, "fits"
    fitting: str = ""  # function(options of `init`, bytes) -> settings, by dotted keys, with which that family fits
    pages: tuple[Page, ...] = ()  # pages of `latentmill view`, besides the overview, the curves of training and SQL
    detail: Detail | None = None  # the page about one input
    thumbnail: str = ""  # function(path, longest side in pixels, value of `background`) -> a WebP picture, for the page
    background: str = ""  # the setting, such as "latents.background", whose colour lies behind transparent pixels
    side_by_side: str = ""  # function(runs, rows, out): writes the results of several runs into one file; returns out or None
    # What is still to be given by the user, such as "captions missing" -> SQL that counts it as the column n
    lacks: Mapping[str, str] = field(default_factory=dict)
    ranking: Panel | None = None  # SQL with the columns adapter_id and score, the higher the better; `title` names the score

    def stage(self, name: str) -> Stage:
        found: Stage = import_module(self.stages[name]).STAGE
        assert found.name == name, f"{self.stages[name]} writes {found.name}, not {name}"
        return found

    def upstream(self, name: str) -> list[str]:
        """The stages whose tables decide that of `name`, in the order of the chain."""
        return self._before(name, frozenset())

    def chain(self, name: str, sections: Collection[str]) -> list[str]:
        """The stages that run before `name`: `upstream`, and optional ones by `first`. `sections`: of project.toml."""
        return self._before(name, {each for each, when in self.first.items() if when == "always" or when in sections})

    def _before(self, name: str, optional: Collection[str]) -> list[str]:
        needed = {name}
        for other in reversed(list(self.stages)):
            if other in needed:
                stage = self.stage(other)
                needed |= {read.name for read in stage.reads} | {each.name for each in stage.optional if each.name in optional}
        return [other for other in self.stages if other in needed - {name}]


def load(reference: str) -> Any:
    """`reference` is "module:attribute"."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)
