"""The numbers of a training run that a tracker shows, computed from the rows of its table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

Values = dict[str, float]  # metric -> value

ONCE = ("lr", "grad_norm")  # columns with one value per step


def points(rows: pa.Table, after: int = -1) -> Iterator[tuple[int, Values]]:
    """Yield (step, values) for each step after the step `after`, in order. `rows` are rows of a training table.
    `values` maps the name of a metric to a number. "train/loss" and "validation/loss" are the mean losses of the step's
    training and held-out samples. "train/lr" is its learning rate, and "train/grad_norm" the norm of its gradient.
    Metrics that were not measured at a step are left out. So is "validation/loss" if some held-out samples are still
    missing.
    """
    rows = rows.filter(pc.greater(rows["step"], after))
    found: dict[int, Values] = {}
    for each in _means(rows, "train", [name for name in ONCE if name in rows.column_names]):
        values = {name: each[f"{name}_max"] for name in ONCE if each.get(f"{name}_max") is not None}
        found[each["step"]] = {"train/loss": each["loss_mean"], **{f"train/{name}": value for name, value in values.items()}}
    measured = _means(rows, "validation", [])
    whole = max((each["loss_count"] for each in measured), default=0)
    for each in measured:
        if each["loss_count"] == whole:
            found.setdefault(each["step"], {})["validation/loss"] = each["loss_mean"]
    yield from sorted(found.items())


def _means(rows: pa.Table, split: str, once: list[str]) -> list[dict[str, Any]]:
    own = rows.filter(pc.equal(rows["split"], split))
    found = own.group_by("step").aggregate([("loss", "mean"), ("loss", "count"), *((name, "max") for name in once)])
    means: list[dict[str, Any]] = found.to_pylist()
    return means
