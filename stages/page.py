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
    """A table on a web page that shows the rows of the query `sql`. A column named `picture` is shown as a small image."""

    title: str
    sql: str


@dataclass(frozen=True)
class Cards:
    """Cards on a web page. The SQL query `sql` returns one row per card, with at least the columns `picture`, `name`
    and `text`. `filters` maps a filter's name to an SQL condition over the columns. `orders` maps an order's name to an
    SQL `order by` clause. The first order is the default. `searched` is an SQL expression over the columns. It gives
    the text in which the user may search. If `searched` is empty, the page offers no search.
    """

    title: str
    sql: str
    filters: Mapping[str, str] = field(default_factory=dict)
    orders: Mapping[str, str] = field(default_factory=dict)
    searched: str = ""


@dataclass(frozen=True)
class Sheet:
    """A table of pictures on a web page, with a slider that chooses a training step. `title` is the table's title. The
    SQL query `sql` returns one record per picture, with the fields `row`, `column`, `step` and `picture`. `row` is the
    heading at the left of the picture's cell, and `column` is the heading above the cell. Each cell shows the newest
    picture that is not later than the chosen step.

    With pictures of the steps 100 and 200, the slider at 150 shows the picture of step 100. If all pictures are later,
    as with the slider at 50, the first picture is shown.
    """

    title: str
    sql: str


@dataclass(frozen=True)
class Editor:
    """A list of texts on a web page. The user may edit the texts. The SQL query `sql` returns one row per text, with
    the columns `key`, `name`, `text`, `picture` and `edited`. `edited` is true if the user has changed the text.
    `write` and `read` name the functions that store and load edits, as "module:function". `note` explains to the user
    what an edit does.

    The function `write(project_folder, edits)` stores edits in the project. `edits` maps a key to its new text, or to
    None to undo an edit. It raises ValueError if a text cannot be used. The function `read(project_folder)` returns a
    dict of all edits, from key to text.

    `write_files` names a function that writes all edits into files of the user. `undo_files` names a function that
    takes this back. Both take the `StageContext` of the stage `stage` and return a sentence for the user. If they are
    empty, the page offers neither.
    """

    title: str
    sql: str
    write: str
    read: str
    note: str = ""
    stage: str = ""
    write_files: str = ""
    undo_files: str = ""


Block = Chart | Listing | Cards | Sheet | Editor


@dataclass(frozen=True)
class Page:
    """One page of the project's web site. `name` is its name in the address. `title` is its title. `blocks` are the
    charts, tables and other parts that it shows.
    """

    name: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Detail:
    """The web page about one input, such as an image. `sql`, `boxes` and `masks` are SQL queries in which `$text`
    stands for the input's key. `sql` returns one row with the columns `picture`, `width` and `height`. `boxes` returns
    rectangles to draw over the picture: `label`, `x`, `y`, `width` and `height`, in pixels. `masks` returns grey
    pictures: `label`, `columns` (pixels per row) and `values` (one byte per pixel). `draw_mask` names a function that
    draws a grey picture. `boxes` and `masks` may be "" for none.

    The bytes in `values` are numbers from 0 to 255, row by row. `draw_mask` has the form "module:function". The
    function is called as `draw_mask(columns, values)`, and returns a WebP picture as bytes.
    """

    sql: str
    boxes: str = ""
    masks: str = ""
    draw_mask: str = ""
