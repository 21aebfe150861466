"""The numbers of a training run that a tracker shows, computed from the rows of its table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

Values = dict[str, float]  # metric -> value

ONCE = ("lr", "grad_norm")  # columns with one value per step


def points(rows: pa.Table, after: int = -1) -> Iterator[tuple[int, Values]]:
    """(step, values) for each step after `after`: mean losses of training and held-out samples, lr, grad_norm."""
    rows = rows.filter(pc.greater(rows["step"], after))
    found: dict[int, Values] = {}
    for each in _means(rows, "train", [name for name in ONCE if name in rows.column_names]):
        values = {name: each[f"{name}_max"] for name in ONCE if each.get(f"{name}_max") is not None}
        found[each["step"]] = {"train/loss": each["loss_mean"], **{f"train/{name}": value for name, value in values.items()}}
    measured = _means(rows, "validation", [])
    whole = max((each["loss_count"] for each in measured), default=0)
    for each in measured:
        # Some held-out samples of the step may still be missing.
        if each["loss_count"] == whole:
            found.setdefault(each["step"], {})["validation/loss"] = each["loss_mean"]
    yield from sorted(found.items())


def _means(rows: pa.Table, split: str, once: list[str]) -> list[dict[str, Any]]:
    own = rows.filter(pc.equal(rows["split"], split))
    found = own.group_by("step").aggregate([("loss", "mean"), ("loss", "count"), *((name, "max") for name in once)])
    means: list[dict[str, Any]] = found.to_pylist()
    return means
