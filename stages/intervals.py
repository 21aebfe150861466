"""Bootstrap intervals of means over queries or pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

RESAMPLES = 2000
PERCENTILES = (2.5, 97.5)  # the ends of a 95 % interval


def bootstrap(count: int, measure: Callable[[Any], float]) -> tuple[float, float]:
    """95 % interval of `measure(places)`, `places` being drawn with replacement from `count` independent cases."""
    if not count:
        return 0.0, 0.0
    draws = np.random.default_rng(0)
    low, high = np.percentile([measure(draws.integers(0, count, count)) for _ in range(RESAMPLES)], PERCENTILES)
    return float(low), float(high)


def bootstrap_mean(values: np.ndarray) -> tuple[float, float]:
    """To compare two systems, pass their differences query by query."""
    return bootstrap(len(values), lambda places: float(values[places].mean()))
