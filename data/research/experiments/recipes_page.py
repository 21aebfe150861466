"""Write the page of the recipes: recipes.md and recipes.png are made from recipes.jsonl.

    python -m data.research.experiments.recipes_page

replaces the table in recipes.md, between `<!-- recipes: generated -->` and `<!-- end -->`. No experiment is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data import DOCS, MEASUREMENTS
from data.research.experiments.recipes import COLUMNS, RATE, interval, read_rows
from data.research.experiments.report import with_table
from data.research.experiments.tables import markdown
from pipeline.plots import BLUE, GREY, ORANGE, Curve, Panel, save

PAGE, CHART = "recipes.md", "recipes.png"
HEAD = ("recipe", "seeds", "style", "nearness to real pictures", "agreement less the base's", "R@10", "loss", "steps")

Rows = dict[str, list[dict[str, Any]]]


def table(rows: Rows) -> str:
    """Return the table in Markdown: one line per recipe, by style, the best first."""
    lines = []
    for name in by_style(rows):
        runs = rows[name]
        mean = {key: sum(run[key] for run in runs) / len(runs) for key in ("recall", "loss")}
        scores = (str(interval(runs, column)) for column in COLUMNS)
        steps = runs[0]["set"].get("train.steps", "")
        lines.append((name, str(len(runs)), *scores, f"{mean['recall']:.2f}", f"{mean['loss']:.3f}", str(steps)))
    return markdown(HEAD, lines)


def by_style(rows: Rows) -> list[str]:
    """Return the names of the recipes, sorted by their mean style, the highest first."""
    return sorted(rows, key=lambda name: -interval(rows[name], "style").mean)


def chart(rows: Rows) -> list[Panel]:
    """Return two panels: style and agreement of each recipe, with 95 % intervals. Recipes are numbered as in the table."""
    order = by_style(rows)
    panels = []
    for column, title in (("style", "Style above the base's, AUC"), ("agreement", "Agreement less the base's")):
        curves = []
        for label, color, chosen in (
            ("latentmill", BLUE, [name for name in order if name.startswith("latentmill")]),
            ("others, as they are", GREY, [name for name in order if not name.startswith("latentmill") and "rate x" not in name]),
            (f"others, rate x {RATE}", ORANGE, [name for name in order if "rate x" in name]),
        ):
            found = [interval(rows[name], column) for name in chosen]
            places = [float(order.index(name) + 1) for name in chosen]
            errors = [(one.high - one.low) / 2 for one in found]
            curves.append(Curve(label, color, places, [one.mean for one in found], errors, joined=False, marked=True))
        ticks = {float(line): str(line) for line in range(1, len(order) + 1, 3)}
        panels.append(Panel(title, "line of the table", column, curves, ticks=ticks))
    return panels


def write(folder: Path) -> None:
    """Write the chart and the table of the page in `folder`."""
    rows = read_rows(MEASUREMENTS / "recipes.jsonl")
    save(chart(rows), folder / CHART, columns=2)
    page = folder / PAGE
    page.write_text(with_table(page.read_text(), "recipes", table(rows)))


if __name__ == "__main__":
    write(DOCS / "experiments")
