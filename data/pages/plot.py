"""Small charts with Pillow alone: curves over one axis, in panels side by side. What is plotted travels in the PNG itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

PAPER, INK, SOFT, GRID = (255, 255, 255), (32, 36, 42), (108, 114, 124), (229, 231, 235)
GREY, BLUE, ORANGE, GREEN, PURPLE = (150, 156, 166), (37, 99, 204), (219, 92, 24), (20, 135, 96), (133, 76, 190)

SCALE = 2  # image pixels per pixel of the layout, for sharp screens
FINE = 2  # drawn that much larger again and shrunk: lines without steps
EDGE, LEFT, BELOW, ABOVE, BETWEEN = 24, 34, 30, 30, 26  # pixels: page margin; around a panel's field; between panels
HEAD, LEGEND = 58, 26  # pixels: title with subtitle; one line of the legend
TITLE, TEXT, SMALL = 19, 13, 11  # pixels: letters
WIDTH = 2.2  # pixels: a curve
COLORS = 96  # of the file: flat colours and the shades between them
NOTES = "plotted"  # the PNG's text chunk that holds the points as JSON

Color = tuple[int, int, int]


@dataclass(frozen=True)
class Curve:
    """One line. With `dots` its points are shown and not joined. `note` stands above the panel, in the curve's colour."""

    name: str
    color: Color
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = False
    note: str = ""


@dataclass(frozen=True)
class Panel:
    """Curves over 0 .. 1 on a field from 0 up to `top`; what is above is cut off."""

    title: str
    curves: Sequence[Curve]
    top: float


@dataclass(frozen=True)
class Chart:
    """A page of panels with one legend: names and colours that several panels share stand in it once."""

    title: str
    subtitle: str
    axis: str
    panels: Sequence[Panel]
    columns: int
    size: tuple[int, int]  # pixels: of a panel's field


def points(chart: Chart) -> dict[str, Any]:
    """What is plotted, to four digits: panel -> curve -> [x, y]."""
    return {
        panel.title: {
            curve.name: [[float(f"{v:.4g}") for v in values] for values in (curve.x, curve.y)] for curve in panel.curves
        }
        for panel in chart.panels
    }


def save(chart: Chart, file: Path) -> None:
    """Draw a chart into a PNG that also holds its points."""
    notes = PngInfo()
    notes.add_text("Title", chart.title)
    notes.add_text(NOTES, json.dumps(points(chart)), zip=True)
    draw(chart).quantize(COLORS, dither=Image.Dither.NONE).save(file, pnginfo=notes, optimize=True)


def read(file: Path) -> dict[str, Any]:
    """The points of a PNG that `save` wrote."""
    with Image.open(file) as image:
        found: dict[str, Any] = json.loads(image.info[NOTES])
    return found


def draw(chart: Chart) -> Image.Image:
    """The chart as an image."""
    width, height = chart.size
    legend = {curve.name: curve for panel in chart.panels for curve in panel.curves}
    rows = -(-len(chart.panels) // chart.columns)
    cell = (LEFT + width + BETWEEN, ABOVE + height + BELOW + 8)
    head = EDGE + HEAD + (LEGEND if len(legend) > 1 else 0)
    page = _Page(2 * EDGE + chart.columns * cell[0] - BETWEEN, head + rows * cell[1] + EDGE - 8)
    page.text((EDGE, EDGE - 6), chart.title, INK, TITLE)
    page.text((EDGE, EDGE + 22), chart.subtitle, SOFT, TEXT)
    if len(legend) > 1:
        _legend(page, list(legend.values()))
    for n, panel in enumerate(chart.panels):
        left, top = EDGE + LEFT + n % chart.columns * cell[0], head + n // chart.columns * cell[1] + ABOVE
        last = n + chart.columns >= len(chart.panels)
        _panel(page, panel, (left, top, left + width, top + height), chart.axis if last else "")
    return page.image.resize((page.width * SCALE, page.height * SCALE), Image.Resampling.LANCZOS)


class _Page:
    """An image that is drawn on in the pixels of the layout."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.image = Image.new("RGB", (width * SCALE * FINE, height * SCALE * FINE), PAPER)
        self.pen = ImageDraw.Draw(self.image)

    def text(self, at: tuple[float, float], text: str, color: Color, size: int, anchor: str = "la") -> None:
        self.pen.text(_big(at), text, color, _font(size), anchor=anchor)

    def line(self, ends: Sequence[tuple[float, float]], color: Color, width: float = 1) -> None:
        self.pen.line([_big(end) for end in ends], color, round(width * SCALE * FINE), joint="curve")

    def dot(self, at: tuple[float, float], color: Color, radius: float = 3) -> None:
        self.pen.ellipse((*_big((at[0] - radius, at[1] - radius)), *_big((at[0] + radius, at[1] + radius))), color)


def _big(at: tuple[float, float]) -> tuple[float, float]:
    return at[0] * SCALE * FINE, at[1] * SCALE * FINE


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size * SCALE * FINE)


def _length(text: str, size: int) -> float:
    return _font(size).getlength(text) / (SCALE * FINE)


def _legend(page: _Page, curves: Sequence[Curve]) -> None:
    x, y = float(EDGE), EDGE + HEAD
    for curve in curves:
        if curve.dots:
            page.dot((x + 11, y), curve.color)
        else:
            page.line([(x, y), (x + 22, y)], curve.color, WIDTH)
        page.text((x + 29, y), curve.name, INK, TEXT, "lm")
        x += 29 + _length(curve.name, TEXT) + 26


def _panel(page: _Page, panel: Panel, field: tuple[int, int, int, int], axis: str) -> None:
    left, top, right, bottom = field
    page.text((left, top - 9), panel.title, INK, TEXT, "ls")
    step = next(s for s in (0.25, 0.5, 1.0, 2.0, 5.0, 10.0) if panel.top / s <= 5)
    for n in range(int(panel.top / step + 1e-9) + 1):
        y = bottom - (bottom - top) * n * step / panel.top
        page.line([(left, y), (right, y)], SOFT if n == 0 else GRID)
        page.text((left - 7, y), f"{n * step:g}", SOFT, SMALL, "rm")
    for x in (0, 0.25, 0.5, 0.75, 1):
        page.text((left + (right - left) * x, bottom + 6), f"{x:g}", SOFT, SMALL, "ma")
    if axis:
        page.text(((left + right) / 2, bottom + 21), axis, SOFT, SMALL, "ma")
    _curves(page, panel, field)


def _curves(page: _Page, panel: Panel, field: tuple[int, int, int, int]) -> None:
    """The curves over a copy of the field, so that what leaves it is cut off."""
    left, top, right, bottom = field
    layer = _Page(page.width, page.height)
    layer.image.paste(page.image)
    for curve in panel.curves:
        ends = [
            (left + (right - left) * x, bottom - (bottom - top) * y / panel.top) for x, y in zip(curve.x, curve.y, strict=True)
        ]
        if curve.dots:
            for end in ends:
                layer.dot(end, curve.color)
        else:
            layer.line(ends, curve.color, WIDTH)
    x, y = left * SCALE * FINE, (top - 2) * SCALE * FINE
    page.image.paste(layer.image.crop((x, y, right * SCALE * FINE, (bottom + 3) * SCALE * FINE)), (x, y))
    place = float(right)
    for curve in reversed([curve for curve in panel.curves if curve.note]):
        page.text((place, top - 9), curve.note, curve.color, SMALL, "rs")
        place -= _length(curve.note, SMALL) + 9
