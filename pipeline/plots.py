"""Draws charts as PNG files with matplotlib (the extra `plots`); `latentmill memory` and the pages in data/ use it."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The palette of Okabe and Ito. Line styles and markers differ too, for readers who cannot tell the colours apart.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#aa4499", "#707070"
LINE_STYLES = {BLUE: "-", ORANGE: "--", GREEN: "-.", PURPLE: (0, (5, 1, 1, 1, 1, 1)), GREY: ":"}
MARKERS = {BLUE: "o", ORANGE: "s", GREEN: "^", PURPLE: "D", GREY: "v"}

DPI = 140
PALETTE = 64  # colours of the PNG: the curves' and the shades at their edges
TEXT_CHUNK = "plotted"  # the PNG's text chunk that holds the plotted numbers as JSON


class MatplotlibMissing(ValueError):  # noqa: N818  (a state that the user can change, described in one line)
    def __init__(self) -> None:
        super().__init__("plots need matplotlib, which is not installed: pip install 'latentmill[plots]'")


@dataclass(frozen=True)
class Curve:
    name: str
    color: str  # a key of MARKERS
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float] = ()  # half-lengths of error bars
    joined: bool = True  # by a line
    marked: bool = False
    note: str = ""  # short text above the panel, in the same colour


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    y_range: tuple[float, float] | None = None  # None: automatic
    ticks: Mapping[float, str] = field(default_factory=dict)  # x -> label; empty: automatic


def draw(panels: Sequence[Panel], *, title: str = "", columns: int = 2, panel_inches: tuple[float, float] = (3.6, 2.6)) -> Any:
    """A matplotlib Figure with a grid of panels. Raises MatplotlibMissing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MatplotlibMissing from None

    rows = -(-len(panels) // columns)
    named = {(curve.color, curve.name) for panel in panels for curve in panel.curves}
    # One legend serves all panels, unless a colour names different curves in different panels.
    shared = len({color for color, _ in named}) == len(named)
    figure = Figure(figsize=(columns * panel_inches[0], rows * panel_inches[1] + 0.3 * bool(title) + 0.3 * shared))
    figure.set_layout_engine("constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, panel in zip(grid[: len(panels)], panels, strict=True):
        _draw_panel(axes, panel, legend=not shared)
    for unused in grid[len(panels) :]:
        unused.set_axis_off()
    if title:
        figure.suptitle(textwrap.fill(title, round(9.5 * columns * panel_inches[0])), fontsize=11)  # letters per inch
    if shared:
        entries = {label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        place = {"loc": "outside lower center", "ncols": 5, "fontsize": 8, "frameon": False}
        figure.legend(list(entries.values()), list(entries), **place)
    return figure


def save(panels: Sequence[Panel], file: Path, **options: Any) -> None:
    """Draw a chart into a PNG, whose text chunk `TEXT_CHUNK` holds the plotted numbers as JSON. Raises MatplotlibMissing."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    raw, chunks = io.BytesIO(), PngInfo()
    draw(panels, **options).savefig(raw, format="png", dpi=DPI)
    chunks.add_text(TEXT_CHUNK, json.dumps(plotted(panels)), zip=True)
    with Image.open(raw) as image:
        flat = image.convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE)
    flat.save(file, format="PNG", pnginfo=chunks, optimize=True)


def plotted(panels: Sequence[Panel]) -> dict[str, Any]:
    """Panel title -> curve name -> [x, y, errors], rounded to 4 digits."""
    return {
        panel.title: {
            curve.name: [[float(f"{value:.4g}") for value in values] for values in (curve.x, curve.y, curve.errors)]
            for curve in panel.curves
        }
        for panel in panels
    }


def _draw_panel(axes: Any, panel: Panel, *, legend: bool) -> None:
    for number, curve in enumerate(panel.curves):
        axes.errorbar(
            curve.x,
            curve.y,
            yerr=curve.errors or None,
            color=curve.color,
            linestyle=LINE_STYLES[curve.color] if curve.joined else "none",
            marker=MARKERS[curve.color] if curve.marked else "none",
            markersize=4.5,
            linewidth=1.6,
            capsize=2.5,
            label=curve.name,
        )
        place = (1 - 0.13 * (len(panel.curves) - 1 - number), 1.02)
        axes.annotate(curve.note, place, xycoords="axes fraction", color=curve.color, fontsize=7, ha="right", va="bottom")
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.set_xlabel(panel.x_label, fontsize=8)
    axes.set_ylabel(panel.y_label, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(visible=True, axis="y", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.y_range:
        axes.set_ylim(*panel.y_range)
    if panel.ticks:
        axes.margins(x=0.12)
        axes.set_xticks(list(panel.ticks), labels=list(panel.ticks.values()))
    if legend:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, fontsize=7, frameon=False)
