"""What a pipeline adds to the local web page of a project: pages of blocks, each answered by SQL over the project's tables."""

# A picture is named in SQL by the text "SOURCE/PATH". SOURCE is a folder that the pipeline declares as a resource, or the name
# of a table; then PATH begins with the recipe of the table's folder.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    sql: str  # columns key, name, text, picture, edited
    write: str  # write(project_folder, {key: new text, None to undo}); ValueError for a text that cannot be used
    read: str  # read(project_folder) -> all edits, key -> text
    note: str = ""  # for the user: what an edit does
    stage: str = ""  # whose Run the next two get
    write_files: str = ""  # writes all edits into files of the user and returns a sentence for the user
    undo_files: str = ""  # takes that back


Block = Chart | Listing | Cards | Sheet | Editor


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
