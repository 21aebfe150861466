"""Random numbers as pure functions of (seed, purpose, counters), for example (7, "noise", step, sample).

So any step can be replayed alone, whatever the workers and micro-batches. NumPy draws on the host: equal bits on all backends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    text = ":".join([str(seed), purpose, *map(str, counters)])
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


def uniform(seed: int, purpose: str, *counters: int) -> float:
    return float(generator(seed, purpose, *counters).random())


def normal(shape: tuple[int, ...], seed: int, purpose: str, *counters: int) -> np.ndarray:
    return generator(seed, purpose, *counters).standard_normal(shape, dtype=np.float32)


def permutation(count: int, seed: int, purpose: str, *counters: int) -> list[int]:
    order: list[int] = generator(seed, purpose, *counters).permutation(count).tolist()
    return order


def choice(count: int, seed: int, purpose: str, *counters: int) -> int:
    return int(generator(seed, purpose, *counters).integers(count))


def weighted_choice(weights: Sequence[float], seed: int, purpose: str, *counters: int) -> int:
    """An index, in proportion to the weights. One of them must be above 0."""
    ends = np.cumsum(np.asarray(weights, np.float64))
    return int(np.searchsorted(ends, uniform(seed, purpose, *counters) * ends[-1], side="right"))
