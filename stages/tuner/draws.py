"""Randomness by address: every draw is a pure function of (seed, purpose, counters) and of nothing that ran before.

So any step can be replayed alone, a resumed run equals an unbroken one, and neither the number of workers nor the size of
a micro-batch changes what a sample is given. Drawn on the host, so that all backends get the same bits.
"""

from __future__ import annotations

import hashlib

import numpy as np


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """A generator of its own for each address: Philox under the sha256 of the address."""
    address = ":".join([str(seed), purpose, *map(str, counters)])
    key = int.from_bytes(hashlib.sha256(address.encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


def uniform(seed: int, purpose: str, *counters: int) -> float:
    """One number, 0 <= u < 1."""
    return float(generator(seed, purpose, *counters).random())


def normal(shape: tuple[int, ...], seed: int, purpose: str, *counters: int) -> np.ndarray:
    """A unit normal array, float32."""
    return generator(seed, purpose, *counters).standard_normal(shape, dtype=np.float32)


def permutation(count: int, seed: int, purpose: str, *counters: int) -> list[int]:
    """0 .. count - 1 in a drawn order."""
    order: list[int] = generator(seed, purpose, *counters).permutation(count).tolist()
    return order


def choice(count: int, seed: int, purpose: str, *counters: int) -> int:
    """One of 0 .. count - 1, all alike likely."""
    return int(generator(seed, purpose, *counters).integers(count))
