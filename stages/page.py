"""What a pipeline adds to the local web page of a project: pages of blocks, each answered by SQL over the project's tables.

A picture is named in SQL by the text "SOURCE/PATH". SOURCE is a folder that the pipeline declares as a resource, or the name of a
table; then PATH begins with the recipe of the table's folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Chart:
    """A line chart. `sql` returns the columns `series` (the name of a curve), `x` and `y`, in the order of x. `x_title` and
    `y_title` are the titles of the axes, with units. If `log` is True, the y axis is logarithmic.
    """

    title: str
    sql: str
    x_title: str = "step"
    y_title: str = ""
    log: bool = False


@dataclass(frozen=True)
class Listing:
    """A table of rows, the answer to `sql`. A column `picture` is shown as a small picture."""

    title: str
    sql: str


@dataclass(frozen=True)
class Cards:
    """Rows as cards with a picture. `sql` returns at least `picture`, `name` and `text`. `filters` maps the name of a filter to
    an SQL condition over these columns. `orders` maps the name of an order to an SQL `order by`; the first is the default.
    """

    title: str
    sql: str
    filters: Mapping[str, str] = field(default_factory=dict)
    orders: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sheet:
    """Results as a table of pictures with a slider over the steps. `sql` returns `row` and `column` (headings), `step`, `picture`
    and `text`. A cell shows the result of the chosen step; a column whose results have one step shows it always.
    """

    title: str
    sql: str


@dataclass(frozen=True)
class Editor:
    """Texts that the user may edit. `sql` returns `key`, `name`, `text`, `picture` and `edited` (true for a text that was edited
    here). `write` is "module:function": function(project_folder, edits), where `edits` maps a key to a text or, to take an edit
    back, to None. It keeps the edits in the project and raises ValueError for a text that cannot be used. `read` is
    "module:function": function(project_folder), which returns all edits: key -> text. `note` tells the user what an edit does.
    """

    title: str
    sql: str
    write: str
    read: str
    note: str = ""


Block = Chart | Listing | Cards | Sheet | Editor


@dataclass(frozen=True)
class Page:
    """One page: its name in the address, its title, and its blocks."""

    name: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Detail:
    """The page about one input. `sql` returns one row with `picture`, `width` and `height`; `$text` stands for the input's name.
    `boxes` returns rows `label`, `x`, `y`, `width`, `height` that are drawn over the picture, in its pixels.
    """

    sql: str
    boxes: str = ""
