"""How often images are drawn, by what their folder asks for: repeats, weights, and regularisation images."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def folder_rates(base: Sequence[float], images: Sequence[Row], regularisation: float) -> list[float]:
    """The rate of each crop after the columns `repeats`, `weight` and `use` of its image. `base`: the rates before.
    `regularisation`: draws of regularisation images per draw of another image.
    """
    found = [rate * (1.0 if row["repeats"] is None else row["repeats"]) for rate, row in zip(base, images, strict=True)]
    # Weights compare folders of one use: those of the subject with each other, and those of regularisation images with each
    # other.
    for use in {row["use"] for row in images}:
        own = [n for n, row in enumerate(images) if row["use"] == use and row["weight"] is not None]
        _balance(found, [(n, str(images[n]["folder"]), float(images[n]["weight"])) for n in own])
    subject = sum(rate for rate, row in zip(found, images, strict=True) if row["use"] is None)
    of_class = sum(rate for rate, row in zip(found, images, strict=True) if row["use"] is not None)
    if not of_class:
        return found
    # One factor for all, so that regularisation images keep their proportions among themselves.
    factor = regularisation * subject / of_class
    return [rate if row["use"] is None else rate * factor for rate, row in zip(found, images, strict=True)]


def _balance(rates: list[float], crops: Sequence[tuple[int, str, float]]) -> None:
    """Raise `rates` in place until folders are drawn in proportion to their weights. `crops`: (index into `rates`,
    folder, weight).
    """
    sums: dict[str, float] = defaultdict(float)
    weights = {folder: weight for _, folder, weight in crops}
    for n, folder, _ in crops:
        sums[folder] += rates[n]
    # No rate is reduced: the folder with the largest sum per weight keeps its rates. A folder whose rates are all 0 stays at
    # 0.
    most = max((sums[folder] / weights[folder] for folder in weights), default=0.0)
    for n, folder, weight in crops:
        rates[n] *= most * weight / sums[folder] if sums[folder] else 1.0
