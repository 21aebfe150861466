"""The page of the experiments: tables and charts made of results.jsonl.

    python data/experiments/report.py

writes them into README.md, between `<!-- NAME: generated -->` and `<!-- end -->`, and the charts beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.experiments import charts
from data.experiments.charts import Panel, Series
from data.pages.plot import BLUE, GREEN, GREY, ORANGE, PURPLE

HERE = Path(__file__).parent
RESULTS, PAGE = "results.jsonl", "README.md"
DROPOUT = {"dropout 0": "0", "plain": "0.1", "dropout 0.5": "0.5"}
HELD = {"preserved, dropout 0": "0", "preserved": "0.1"}
COLOURS = {"0": ORANGE, "0.1": BLUE, "0.5": GREEN}
STYLE = "Style of previews: 0 the base, 1 real pictures"
GUIDANCE = (1.0, 3.0, 5.0)

Row = dict[str, Any]


DROPPED = {
    "base": "base",
    **{run: f"dropout {share}" for run, share in DROPOUT.items()},
    **{run: f"with preservation, dropout {share}" for run, share in HELD.items()},
}


class Results:
    """The rows, and what is asked of them."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)

    def loss(self, run: str, side: int = 128, caption: str = "own") -> float:
        """The held-out loss of a run's last adapter."""
        return float(self.only(what="loss", run=run, side=side, caption=caption)[0]["loss"])

    def curve(self, average: bool) -> tuple[list[int], list[float]]:
        """The held-out loss of the noisy run by step: of the adapter, or of its average."""
        rows = self.only(what="loss", run="noisy", side=128, average=average)
        return [row["step"] for row in rows], [row["loss"] for row in rows]

    def mean(self, column: str, run: str, kind: str = "trigger", guidance: float = 3.0, side: int = 128) -> tuple[float, float]:
        """Of the previews of a run the mean and its standard error.

        Style counts from that of the base's preview of the same subject with the trigger, at guidance 3 and 128 px: subjects
        differ more than looks do. The empty prompt has no subject.
        """
        found = self.only(what="picture", run=run, kind=kind, guidance=guidance, side=side)
        start: dict[str, float] = {}
        if column == "style" and kind != "empty":
            usual = self.only(what="picture", run="base", kind="trigger", guidance=3.0, side=128)
            start = {row["subject"]: row["style"] for row in usual}
        return spread([row[column] - start.get(row["subject"], 0.0) for row in found])

    def only(self, **wanted: Any) -> list[Row]:
        """The rows with these values."""
        found = [row for row in self.rows if all(row.get(name) == value for name, value in wanted.items())]
        assert found, f"no row has {wanted}"
        return found


def spread(found: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    values = np.array(found, float)
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)


def read(folder: Path) -> Results:
    """The results in that folder."""
    return Results(json.loads(line) for line in (folder / RESULTS).read_text().splitlines())


def roughness(values: Sequence[float]) -> float:
    """The mean absolute change from one value to the next."""
    return float(np.abs(np.diff(values)).mean())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, numbers to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def about(pair: tuple[float, float], digits: int = 2) -> str:
    """A mean with its standard error."""
    return f"{pair[0]:.{digits}f} ± {pair[1]:.{digits}f}"


def ema(results: Results) -> str:
    """Mean and least loss over the second half of the run, the last one, and roughness over all of it."""
    rows = []
    for name, average in (("the adapter", False), ("its average", True)):
        _, values = results.curve(average)
        half = values[len(values) // 2 :]
        numbers = (values[-1], float(np.mean(half)), min(values), max(half) - min(half))
        rows.append((name, *(f"{number:.4f}" for number in numbers), f"{roughness(half):.4f}"))
    head = ("held-out loss", "last", "mean of the second half", "least", "spread of the second half", "step to step")
    return table(head, rows)


def dropout_losses(results: Results) -> str:
    """Held-out loss under the pictures' captions and under the empty one."""
    rows = [
        (
            name,
            *(f"{results.loss(run, 128, caption):.4f}" for caption in ("own", "empty")),
            about(results.mean("style", run, "empty")),
        )
        for run, name in DROPPED.items()
    ]
    return table(("", "held-out loss, own caption", "empty caption", "style of the empty prompt"), rows)


def dropout_styles(results: Results) -> str:
    """Style and agreement by guidance."""
    rows = [
        (
            name,
            *(about(results.mean("style", run, guidance=g)) for g in GUIDANCE),
            *(about(results.mean("agreement", run, guidance=g)) for g in GUIDANCE),
        )
        for run, name in DROPPED.items()
    ]
    head = ("", *(f"style, guidance {g:g}" for g in GUIDANCE), *(f"agreement, {g:g}" for g in GUIDANCE))
    return table(head, rows)


def sizes(results: Results) -> str:
    """Held-out loss and style at both sizes."""
    rows = []
    for run, name in (("base", "base"), ("plain", "trained at 128"), ("two sizes", "trained at 128 and 192")):
        losses = (f"{results.loss(run, side):.4f}" for side in (128, 192))
        looks = (about(results.mean(column, run, side=side)) for column in ("style", "agreement") for side in (128, 192))
        rows.append((name, *losses, *looks))
    head = ("", "held-out loss, 128 px", "192 px", "style, 128 px", "192 px", "agreement, 128 px", "192 px")
    return table(head, rows)


def preservation(results: Results) -> str:
    """How far previews are from the base's, and their style, with and without the trigger."""
    rows = []
    for run, name in (("plain", "without"), ("preserved", "with `[train.preservation]`")):
        moved = (about(results.mean("moved", run, kind), 1) for kind in ("none", "class", "trigger"))
        style = (about(results.mean("style", run, kind)) for kind in ("none", "class", "trigger"))
        rows.append((name, *moved, *style))
    base = ("base", "0", "0", "0", *(about(results.mean("style", "base", kind)) for kind in ("none", "class", "trigger")))
    head = ("", "moved, no trigger", "class word", "trigger", "style, no trigger", "class word", "trigger")
    return table(head, [base, *rows])


TABLES: dict[str, Callable[[Results], str]] = {
    "ema": ema,
    "dropout-losses": dropout_losses,
    "dropout-styles": dropout_styles,
    "sizes": sizes,
    "preservation": preservation,
}


def bounds(values: Iterable[float], step: float) -> tuple[float, float]:
    """Multiples of `step` around all values."""
    found = list(values)
    return float(np.floor(min(found) / step) * step), float(np.ceil(max(found) / step) * step)


def spans(series: Iterable[Series], step: float, *more: float) -> tuple[float, float]:
    """The same around all points with their errors."""
    ends = [y + sign * error for s in series for y, error in zip(s.y, s.errors, strict=True) for sign in (1, -1)]
    return bounds([*ends, *more], step)


def ema_chart(results: Results) -> list[Panel]:
    """The loss over the steps."""
    curves = {average: results.curve(average) for average in (False, True)}
    ticks = {float(step): str(step) for step in (0, 50, 100, 150, 200)}
    shown = [Series(name, colour, *curves[average]) for name, colour, average in ENDS]
    late = {float(step): str(step) for step in (50, 100, 150, 200)}
    cut = [after(series, 50) for series in shown]
    whole = bounds([value for series in shown for value in series.y], 0.1)
    late_only = bounds([value for series in cut for value in series.y], 0.01)
    return [
        Panel("Held-out loss", ticks, "step", shown, *whole, 0.1),
        Panel("The same from step 50 on", late, "step", cut, *late_only, 0.01),
    ]


def after(series: Series, step: int) -> Series:
    """The points from a step on."""
    kept = [(x, y) for x, y in zip(series.x, series.y, strict=True) if x >= step]
    return Series(series.name, series.color, [x for x, _ in kept], [y for _, y in kept])


ENDS = (("the adapter", ORANGE, False), ("its average ([train.ema])", BLUE, True))


def dropout_chart(results: Results) -> list[Panel]:
    """The loss under the empty caption by dropout; style by guidance."""
    places = [0.0, 1.0, 2.0]
    ticks = {place: f"dropout {share}" for place, share in zip(places, COLOURS, strict=True)}
    empty = [
        Series(name, colour, places[: len(runs)], [results.loss(run, 128, "empty") for run in runs])
        for name, colour, runs in (("alone", GREY, DROPOUT), ("with preservation", PURPLE, HELD))
    ]
    low, high = bounds([value for series in empty for value in series.y], 0.05)
    lines = [(title, styles(results, runs)) for title, runs in (("Style", DROPOUT), ("Style, with preservation", HELD))]
    least, most = spans([series for _, found in lines for series in found], 0.2)
    guidance = {g: f"{g:g}" for g in GUIDANCE}
    return [
        Panel("Held-out loss under the empty caption", ticks, "", empty, low, high, 0.05),
        *(Panel(title, guidance, "guidance", found, least, most, 0.2) for title, found in lines),
    ]


def styles(results: Results, runs: dict[str, str]) -> list[Series]:
    """Style by guidance: of the base, and of each run by its dropout."""
    lines = []
    for run, share in (("base", ""), *runs.items()):
        pairs = [results.mean("style", run, guidance=g) for g in GUIDANCE]
        name, colour = (f"dropout {share}", COLOURS[share]) if share else ("base", GREY)
        lines.append(Series(name, colour, GUIDANCE, [p[0] for p in pairs], [p[1] for p in pairs]))
    return lines


def sizes_chart(results: Results) -> list[Panel]:
    """Loss and style at both sizes."""
    ticks = {0.0: "128 px", 1.0: "192 px"}
    runs = (("plain", "trained at 128", ORANGE, -0.06), ("two sizes", "trained at 128 and 192", BLUE, 0.06))
    losses, looks = [], []
    for run, name, colour, aside in runs:
        at = [aside, 1 + aside]
        losses.append(Series(name, colour, at, [results.loss(run, side) for side in (128, 192)], joined=False))
        pairs = [results.mean("style", run, side=side) for side in (128, 192)]
        looks.append(Series(name, colour, at, [p[0] for p in pairs], [p[1] for p in pairs], joined=False))
    low, high = bounds([y for s in losses for y in s.y], 0.02)
    return [
        Panel("Held-out loss", ticks, "", losses, low, high, 0.02),
        Panel(STYLE, ticks, "", looks, *spans(looks, 0.1), 0.1),
    ]


def preservation_chart(results: Results) -> list[Panel]:
    """Distance from the base and style, by prompt."""
    kinds = {"none": "no trigger", "class": "class word", "trigger": "trigger"}
    ticks = {float(place): name for place, name in enumerate(kinds.values())}
    panels = []
    for column, title, step in (
        ("moved", "Distance from the base's picture, levels of 255", 10.0),
        ("style", STYLE, 0.2),
    ):
        shown = []
        for run, name, colour, aside in (
            ("plain", "without", ORANGE, -0.08),
            ("preserved", "with [train.preservation]", BLUE, 0.08),
        ):
            pairs = [results.mean(column, run, kind) for kind in kinds]
            at = [place + aside for place in range(len(kinds))]
            shown.append(Series(name, colour, at, [p[0] for p in pairs], [p[1] for p in pairs], joined=False))
        panels.append(Panel(title, ticks, "", shown, *spans(shown, step, 0.0), step))
    return panels


CHARTS: dict[str, Callable[[Results], list[Panel]]] = {
    "ema.png": ema_chart,
    "dropout.png": dropout_chart,
    "sizes.png": sizes_chart,
    "preservation.png": preservation_chart,
}


def filled(text: str, results: Results) -> str:
    """The page with its tables made anew."""
    for name, made in TABLES.items():
        begin, end = f"<!-- {name}: generated -->", "<!-- end -->"
        block = f"{begin}\n\n{made(results)}\n\n{end}"
        before, found, rest = text.partition(begin)
        _, closed, rest = rest.partition(end)
        assert found and closed, f"{PAGE} has no place for {name}"
        text = before + block + rest
    return text


def write(folder: Path) -> None:
    """The charts, and the page where there is one."""
    results = read(folder)
    for name, made in CHARTS.items():
        charts.save(made(results), folder / name)
    page = folder / PAGE
    if page.exists():
        page.write_text(filled(page.read_text(), results))


if __name__ == "__main__":
    write(HERE)
