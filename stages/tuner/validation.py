"""Measuring a run on rows that it never trains on: the same rows, noise and noise levels each time, so that only the adapter
differs. And what the measurements decide: when to stop, and which checkpoint is best.

All are functions of the measurements alone: a resumed run decides as an unbroken one does.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from stages.tuner import draws


def steps(every: int, last: int) -> range:
    """When to measure: before the first step, and after every `every` steps, up to `last`."""
    return range(0, last + 1, every)


def batches(shapes: Sequence[Hashable], sigmas: Sequence[float], batch_size: int) -> list[list[tuple[int, float]]]:
    """Each row at each level, as batches of (row, sigma) of one shape each."""
    alike: dict[Hashable, list[tuple[int, float]]] = {}
    for row, shape in enumerate(shapes):
        alike.setdefault(shape, []).extend((row, sigma) for sigma in sigmas)
    return [pairs[n : n + batch_size] for pairs in alike.values() for n in range(0, len(pairs), batch_size)]


def noise(shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
    """The noise of the row of that name: the same at every level and every time, whatever other rows there are."""
    return draws.normal(shape, seed, f"validation {name}")


def means(losses: Iterable[tuple[int, float]], count: int) -> dict[int, float]:
    """The mean loss of each measurement, from pairs of step and loss in any order; those without all `count` are left out.

    Infinite where a loss is not finite: no better than any.
    """
    found: dict[int, list[float]] = {}
    for step, loss in losses:
        found.setdefault(step, []).append(loss)
    whole = {step: values for step, values in sorted(found.items()) if len(values) == count}
    return {step: math.fsum(v) / count if all(map(math.isfinite, v)) else math.inf for step, v in whole.items()}


def stops_at(measured: Mapping[int, float], every: int, patience: int, min_delta: float = 0.0) -> int | None:
    """The step after which `patience` measurements in a row were no better than the best before them by more than
    `min_delta`; None if that has not happened in the measurements from step 0 on without a gap.
    """
    least, since, step = math.inf, 0, 0
    while step in measured:
        if measured[step] < least - min_delta:
            least, since = measured[step], 0
        elif step:
            since += 1
        if since >= patience:
            return step
        step += every
    return None


def best(measured: Mapping[int, float]) -> int | None:
    """The step with the lowest mean loss, the earliest of equals; None without any. Step 0, the start, is no candidate."""
    finite = {step: loss for step, loss in measured.items() if step and loss < math.inf}
    return min(finite, key=lambda step: (finite[step], step), default=None)
