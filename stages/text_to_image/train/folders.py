"""How often images are drawn, by the folder that they are from: repeats, weights, and regularisation images.

The columns `folder`, `use`, `repeats` and `weight` of the table `images` hold what a folder asks for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def folder_rates(base: Sequence[float], images: Sequence[Row], regularisation: float) -> list[float]:
    """Return the rate of each crop: how many times an epoch uses it on average, as a list of numbers. `base` holds the
    rate of each crop before the settings of its folder are applied. `images` holds, for each crop, the row of its image
    in the table `images`. `regularisation` is the number of regularisation images per image of the subject.

    Three steps change the rates. First, each rate is multiplied by the row's column `repeats`, if set. Second, rates of
    folders with a `weight` (another column) are raised until these folders are drawn in proportion to their weights
    (see `_balance`). This is done separately for the subject's and for regularisation images. Third, the rates of all
    regularisation images are multiplied by one factor, so that their sum is `regularisation` times the sum of the
    subject's rates.
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
    """Raise the rates of crops so that each folder is drawn in proportion to its weight. `rates` holds the rate of
    every crop (how many times an epoch uses it), and is changed in place. `crops` lists the crops to change, each as
    (index into `rates`, folder, weight of the folder). For example, two folders have the weights 1 and 2, and the rates
    in each add up to 10. The rates of the second folder are then doubled.

    No rate is reduced. The folder with the largest sum of rates per weight keeps its rates. A folder whose rates are
    all 0 stays at 0.
    """
    sums: dict[str, float] = defaultdict(float)
    weights = {folder: weight for _, folder, weight in crops}
    for n, folder, _ in crops:
        sums[folder] += rates[n]
    most = max((sums[folder] / weights[folder] for folder in weights), default=0.0)
    for n, folder, weight in crops:
        rates[n] *= most * weight / sums[folder] if sums[folder] else 1.0
