"""The charts of the page of the experiments: one function per chart returns its panels."""

from __future__ import annotations

from collections.abc import Callable

from data.research.experiments.results import DROPOUT, GUIDANCE, PRESERVED, Results
from pipeline.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, Curve, Panel

STYLE = "style (0: base, 1: real pictures)"
COLORS = {"0": ORANGE, "0.1": BLUE, "0.5": GREEN}  # by caption dropout


def ema(results: Results) -> list[Panel]:
    """Return the panels of the chart of EMA: the held-out loss over the steps, of the adapter and of its moving average. A
    second panel shows the steps from 50 on, on a finer scale.
    """
    whole, late = [], []
    for name, color, average in (("adapter", ORANGE, False), ("its average ([train.ema])", BLUE, True)):
        points = list(zip(*results.loss_curve(average), strict=True))
        whole.append(_joined(name, color, points))
        late.append(_joined(name, color, [point for point in points if point[0] >= 50]))
    return [
        Panel("All steps", "step", "held-out loss", whole),
        Panel("From step 50 on", "step", "held-out loss", late),
    ]


def dropout(results: Results) -> list[Panel]:
    """Return the panels of the chart of caption dropout. One shows the held-out loss under the empty caption by dropout
    rate. The other shows the style by guidance, without and with preservation.
    """
    losses = [
        Curve(name, color, list(range(len(runs))), [results.loss(run, 128, "empty") for run in runs], marked=True)
        for name, color, runs in (("without preservation", GREY, DROPOUT), ("with preservation", PURPLE, PRESERVED))
    ]
    ticks = {float(place): share for place, share in enumerate(COLORS)}
    return [
        Panel("Loss under the empty caption", "caption dropout", "held-out loss", losses, ticks=ticks),
        _style_by_guidance("Style, without preservation", results, DROPOUT),
        _style_by_guidance("Style, with preservation", results, PRESERVED),
    ]


def sizes(results: Results) -> list[Panel]:
    """Return the panels of the chart of resolutions: held-out loss and style at 128 and 192 px, for runs trained at one
    resolution and at both.
    """
    losses, styles = [], []
    for run, name, color, shift in (
        ("plain", "trained at 128 px", ORANGE, -0.05),
        ("two sizes", "trained at 128 and 192 px", BLUE, 0.05),
    ):
        x = [shift, 1 + shift]
        losses.append(Curve(name, color, x, [results.loss(run, side) for side in (128, 192)], joined=False, marked=True))
        styles.append(_with_errors(name, color, x, [results.mean("style", run, side=side) for side in (128, 192)]))
    ticks = {0.0: "128", 1.0: "192"}
    return [
        Panel("Loss of held-out pictures", "side, px", "held-out loss", losses, ticks=ticks),
        Panel("Style of previews", "side, px", STYLE, styles, ticks=ticks),
    ]


def preservation(results: Results) -> list[Panel]:
    """Return the panels of the chart of [train.preservation]: the distance from the base's pictures, and the style, for
    each kind of prompt, without and with it.
    """
    kinds = {"none": "no trigger", "class": "class word", "trigger": "trigger"}
    ticks = {float(place): label for place, label in enumerate(kinds.values())}
    panels = []
    for column, title, label, y_range in (
        ("moved", "Distance from the base's picture", "difference, levels of 255", (0.0, 35.0)),
        ("style", "Style of previews", STYLE, (-0.3, 1.0)),
    ):
        curves = [
            _with_errors(name, color, [place + shift for place in ticks], [results.mean(column, run, kind) for kind in kinds])
            for run, name, color, shift in (
                ("plain", "without preservation", ORANGE, -0.06),
                ("preserved", "with [train.preservation]", BLUE, 0.06),
            )
        ]
        panels.append(Panel(title, "prompt", label, curves, y_range, ticks))
    return panels


def _joined(name: str, color: str, points: list[tuple[int, float]]) -> Curve:
    return Curve(name, color, [x for x, _ in points], [y for _, y in points], marked=True)


def _with_errors(name: str, color: str, x: list[float], pairs: list[tuple[float, float]], joined: bool = False) -> Curve:
    return Curve(name, color, x, [mean for mean, _ in pairs], [error for _, error in pairs], joined, marked=True)


def _style_by_guidance(title: str, results: Results, runs: dict[str, str]) -> Panel:
    lines = {"base": ("base", GREY)} | {run: (f"dropout {share}", COLORS[share]) for run, share in runs.items()}
    curves = [
        _with_errors(name, color, list(GUIDANCE), [results.mean("style", run, guidance=g) for g in GUIDANCE], joined=True)
        for run, (name, color) in lines.items()
    ]
    return Panel(title, "guidance", STYLE, curves, (-0.3, 1.3), {g: f"{g:g}" for g in GUIDANCE})


CHARTS: dict[str, Callable[[Results], list[Panel]]] = {
    "ema.png": ema,
    "dropout.png": dropout,
    "sizes.png": sizes,
    "preservation.png": preservation,
}
