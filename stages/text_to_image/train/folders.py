"""How often images are drawn, by the folder that they are from: repeats, weights, and regularisation images.

The columns `folder`, `use`, `repeats` and `weight` of the table `images` hold what a folder asks for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def folder_rates(base: Sequence[float], images: Sequence[Row], regularisation: float) -> list[float]:
    """Return how often each crop is drawn per epoch, on average. `base` holds the numbers that the settings [train.data]
    ask for, one per crop. `images` holds the row of the table `images` for each crop. `regularisation` is the number of
    regularisation images that are drawn for each image of the subject.

    An image occurs as often as its folder's `repeats` says. Folders with a `weight` are drawn in proportion to their
    weights. An image of the folder that is drawn most rarely, for its number of images, occurs once per epoch.
    """
    found = [rate * (1.0 if row["repeats"] is None else row["repeats"]) for rate, row in zip(base, images, strict=True)]
    for use in {row["use"] for row in images}:
        own = [n for n, row in enumerate(images) if row["use"] == use and row["weight"] is not None]
        _balance(found, [(n, str(images[n]["folder"]), float(images[n]["weight"])) for n in own])
    subject = sum(rate for rate, row in zip(found, images, strict=True) if row["use"] is None)
    of_class = sum(rate for rate, row in zip(found, images, strict=True) if row["use"] is not None)
    if not of_class:
        return found
    factor = regularisation * subject / of_class
    return [rate if row["use"] is None else rate * factor for rate, row in zip(found, images, strict=True)]


def _balance(rates: list[float], crops: Sequence[tuple[int, str, float]]) -> None:
    """Change `rates` such that the sums over the folders are in proportion to the folders' weights, and no rate falls. Each
    of `crops` is (index into `rates`, folder, weight of the folder).
    """
    sums: dict[str, float] = defaultdict(float)
    weights = {folder: weight for _, folder, weight in crops}
    for n, folder, _ in crops:
        sums[folder] += rates[n]
    most = max((sums[folder] / weights[folder] for folder in weights), default=0.0)
    for n, folder, weight in crops:
        rates[n] *= most * weight / sums[folder] if sums[folder] else 1.0
