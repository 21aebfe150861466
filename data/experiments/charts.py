"""Small charts with Pillow alone: panels of points, joined or not, with their standard errors. Axes need not begin at 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from data.pages.plot import COLORS, GRID, INK, PAPER, SOFT, Color

SCALE = 2  # image pixels per pixel of the layout
WIDTH, HEIGHT = 330, 200  # pixels: of a panel's field
LEFT, RIGHT, ABOVE, BELOW, HEAD = 56, 20, 62, 46, 16  # pixels around it
TEXT, SMALL = 13, 11  # pixels: letters


@dataclass(frozen=True)
class Series:
    """Points of one name; `errors` are drawn up and down."""

    name: str
    color: Color
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float] = ()
    joined: bool = True
    dots: bool = True


@dataclass(frozen=True)
class Panel:
    """A field from `low` to `high` on the y axis; `ticks` name places on the x axis."""

    title: str
    ticks: dict[float, str]
    axis: str
    series: Sequence[Series]
    low: float
    high: float
    step: float


class Pen:
    """Draws in the pixels of the layout."""

    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (width * SCALE, height * SCALE), PAPER)
        self.draw = ImageDraw.Draw(self.image)

    def text(self, x: float, y: float, text: str, color: Color, size: int, anchor: str) -> float:
        """Write; how wide it is."""
        font = ImageFont.load_default(size * SCALE)
        self.draw.text((x * SCALE, y * SCALE), text, color, font, anchor=anchor)
        return float(font.getlength(text)) / SCALE

    def line(self, points: Sequence[tuple[float, float]], color: Color, width: float) -> None:
        """Join points."""
        self.draw.line([(x * SCALE, y * SCALE) for x, y in points], color, round(width * SCALE), joint="curve")

    def dot(self, x: float, y: float, color: Color, radius: float = 3.5) -> None:
        """A point."""
        self.draw.ellipse([(x - radius) * SCALE, (y - radius) * SCALE, (x + radius) * SCALE, (y + radius) * SCALE], color)


def save(panels: Sequence[Panel], file: Path) -> None:
    """The panels side by side in a PNG."""
    cell = LEFT + WIDTH + RIGHT
    pen = Pen(cell * len(panels), HEAD + ABOVE + HEIGHT + BELOW)
    for number, panel in enumerate(panels):
        _panel(pen, panel, number * cell + LEFT, HEAD + ABOVE)
    pen.image.quantize(COLORS, dither=Image.Dither.NONE).save(file, optimize=True)


def _panel(pen: Pen, panel: Panel, left: float, top: float) -> None:
    bottom, first, last = top + HEIGHT, min(panel.ticks), max(panel.ticks)
    room = 0.0 if len(panel.series) == 1 or panel.series[0].joined else 0.5

    def place(x: float, y: float) -> tuple[float, float]:
        along = (x - first + room) / (last - first + 2 * room)
        return left + WIDTH * along, bottom - HEIGHT * (y - panel.low) / (panel.high - panel.low)

    pen.text(left, top - 48, panel.title, INK, TEXT, "ls")
    _legend(pen, panel, left, top - 26)
    for n in range(round((panel.high - panel.low) / panel.step) + 1):
        value = panel.low + n * panel.step
        y = place(first, value)[1]
        pen.line([(left, y), (left + WIDTH, y)], SOFT if n == 0 else GRID, 1)
        pen.text(left - 7, y, f"{value:.4g}", SOFT, SMALL, "rm")
    for x, label in panel.ticks.items():
        pen.text(place(x, panel.low)[0], bottom + 7, label, SOFT, SMALL, "ma")
    pen.text(left + WIDTH / 2, bottom + 25, panel.axis, SOFT, SMALL, "ma")
    for series in panel.series:
        points = [place(x, y) for x, y in zip(series.x, series.y, strict=True)]
        if series.joined:
            pen.line(points, series.color, 2)
        for x, y, error in zip(series.x, series.y, series.errors, strict=bool(series.errors)):
            pen.line([place(x, y - error), place(x, y + error)], series.color, 1.5)
        for x, y in points if series.dots else ():
            pen.dot(x, y, series.color)


def _legend(pen: Pen, panel: Panel, left: float, y: float) -> None:
    for series in panel.series:
        pen.dot(left + 4, y, series.color)
        left += 13 + pen.text(left + 13, y, series.name, INK, SMALL, "lm") + 16
