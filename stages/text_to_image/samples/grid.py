"""Pictures side by side: one image with a label over every column and beside every row."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

CELL = 512  # pixels: the longer side of a picture in the grid
GAP = 8  # pixels between pictures
LABEL = 220  # pixels: width of the rows' labels
HEAD = 36  # pixels: height of the columns' labels
FONT = 16  # pixels
LETTERS = 24  # letters on a line of a row's label
PAPER, INK, BLANK = (255, 255, 255), (30, 30, 30), (225, 225, 225)


def grid(
    cells: Sequence[Sequence[Path | None]], columns: Sequence[str], rows: Sequence[str], size: tuple[int, int]
) -> Image.Image:
    """`cells[row][column]` is a picture's file, or None for a blank; all are shown at the shape of `size`, width and height."""
    scale = min(1.0, CELL / max(size))
    width, height = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
    page = Image.new("RGB", (LABEL + len(columns) * (width + GAP), HEAD + len(rows) * (height + GAP)), PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(FONT)
    for column, label in enumerate(columns):
        draw.text((LABEL + column * (width + GAP), GAP), label, INK, font)
    for row, label in enumerate(rows):
        top = HEAD + row * (height + GAP)
        draw.text((GAP, top), lines(label, height), INK, font)
        for column, path in enumerate(cells[row]):
            page.paste(picture(path, (width, height)), (LABEL + column * (width + GAP), top))
    return page


def picture(path: Path | None, size: tuple[int, int]) -> Image.Image:
    """The picture at that size; a plain field where there is none."""
    if path is None:
        return Image.new("RGB", size, BLANK)
    with Image.open(path) as image:
        return image.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def lines(text: str, height: int) -> str:
    """A label cut into lines, as many as fit beside a picture of that height; each paragraph begins a line."""
    room = max(1, height // (FONT + 4))
    found = [line for part in text.splitlines() for line in textwrap.wrap(part, LETTERS) or [""]]
    return "\n".join(found if len(found) <= room else [*found[: room - 1], "..."])
