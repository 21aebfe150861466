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
    """A table of pictures with a slider that chooses a training step. `sql` returns one row per picture, with the
    columns `row`, `column`, `step`, `picture` and `text`. `row` and `column` are the headings of the picture's cell. A
    cell shows the picture of its last step up to the chosen one. If all its steps are later, it shows its first
    picture.
    """

    title: str
    sql: str


@dataclass(frozen=True)
class Editor:
    """A list of texts that the user may edit. `sql` returns one row per text, with the columns `key`, `name`, `text`,
    `picture` and `edited`. `edited` is true if the user has edited the text. `write` and `read` name functions in the
    form "module:function". `note` tells the user what an edit does.

    The function `write(project_folder, edits)` stores edits in the project. `edits` maps a key to its new text, or to
    None to undo an edit. It raises ValueError if a text cannot be used. The function `read(project_folder)` returns a
    dict of all edits, from key to text.
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
