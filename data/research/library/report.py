"""Read the rows of measured runs, choose the best recipe, and format the results as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from stages.intervals import bootstrap_mean
from stages.retrieval.search import measures

STRENGTHS = (0.25, 0.5, 0.75, 1.0)

Row = dict[str, Any]


def read(out: Path) -> list[Row]:
    """Return the rows of the file `out`. If the file does not exist, the list is empty."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def best_recipe(rows: list[Row]) -> tuple[str, float]:
    """Return the name of the recipe, and the strength, with the best MRR@10 on the validation queries. Only rows without
    ranks of test queries are compared.
    """
    first = [row for row in rows if "test" not in row]
    best = max(first, key=lambda row: reciprocal(row, "valid").mean())
    return str(best["recipe"]), float(best["strength"])


def report(out: Path) -> str:
    """Return the results in the file `out` as Markdown. The first table has the MRR@10 of the validation queries for each
    recipe and strength. Each recipe that was tested has a further table, which compares it with the base on the test
    queries. All intervals are 95 %.

    Intervals of differences are of a paired bootstrap over the queries, for each seed and for the mean of the seeds.
    """
    rows = read(out)
    base = next(row for row in rows if row["recipe"] == "base")
    first = [row for row in rows if "test" not in row]
    lines = ["| recipe | " + " | ".join(f"{share:g}" for share in STRENGTHS) + " |", "|---" + "|---:" * len(STRENGTHS) + "|"]
    for name in dict.fromkeys(row["recipe"] for row in first):
        values = {row["strength"]: reciprocal(row, "valid").mean() for row in first if row["recipe"] == name}
        lines.append(f"| {name} | " + " | ".join(f"{values[share]:.3f}" for share in STRENGTHS) + " |")
    valid = reciprocal(base, "valid")
    lines += ["", f"MRR@10 of {len(valid)} validation queries by strength; the base has {valid.mean():.3f}."]
    tested: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        if "test" in row and row is not base:
            tested.setdefault((row["recipe"], row["strength"]), []).append(row)
    for (recipe, strength), tuned in tested.items():
        lines += ["", f"Test, {len(base['test'])} queries, recipe: {recipe}, strength {strength:g}", "", *_compare(base, tuned)]
    return "\n".join(lines)


def _compare(base: Row, tuned: list[Row]) -> list[str]:
    """Return the lines of a Markdown table that compares one recipe with the base on the test queries, and one line for
    each difference. `base` is the row of the base. `tuned` has one row of the recipe per seed.
    """
    lines = ["| encoder | P@1 | MRR@10 | R@10 |", "|---|---|---|---|"]
    for name, row in [("base", base), *((f"tuned, seed {row['seed']}", row) for row in tuned)]:
        shown = []
        for label in ("P@1", "MRR@10", "R@10"):
            each = measures.MEASURES[label](np.array(row["test"]))
            low, high = bootstrap_mean(each)
            shown.append(f"{each.mean():.3f} [{low:.3f}, {high:.3f}]")
        lines.append(f"| {name} | {' | '.join(shown)} |")
    for split, about in (("test", ""), ("valid", " of the validation queries")):
        before = reciprocal(base, split)
        gains = {f"Seed {row['seed']}": reciprocal(row, split) - before for row in tuned if split in row}
        if len(gains) > 1:
            gains[f"Mean of {len(gains)} seeds"] = np.mean(list(gains.values()), axis=0)
        for name, gain in gains.items():
            low, high = bootstrap_mean(gain)
            lines.append(f"\n{name} less base, MRR@10{about}: {gain.mean():+.3f} [{low:+.3f}, {high:+.3f}], paired bootstrap.")
    return lines


def reciprocal(row: Row, split: str) -> np.ndarray:
    """Return 1 / rank for each query of `split` ("valid" or "test") in `row`. The value is 0 if the rank is above 10."""
    return measures.reciprocal(np.array(row[split]))
