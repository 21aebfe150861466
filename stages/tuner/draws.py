"""Random draws by address: every draw is a pure function of (seed, purpose, counters).

So any step can be replayed alone, a resumed run equals an unbroken one, and neither the number of workers nor the size of a
micro-batch changes what a sample draws. Draws are made on the host, so that all backends get the same bits.
"""

from __future__ import annotations

import hashlib

import numpy as np


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """Return the random generator of an address: Philox, keyed with the sha256 of (seed, purpose, counters)."""
    address = ":".join([str(seed), purpose, *map(str, counters)])
    key = int.from_bytes(hashlib.sha256(address.encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


def uniform(seed: int, purpose: str, *counters: int) -> float:
    """Draw one number u, 0 <= u < 1, at the address (seed, purpose, counters)."""
    return float(generator(seed, purpose, *counters).random())


def normal(shape: tuple[int, ...], seed: int, purpose: str, *counters: int) -> np.ndarray:
    """Draw a float32 array of that shape from the standard normal distribution, at the address (seed, purpose, counters)."""
    return generator(seed, purpose, *counters).standard_normal(shape, dtype=np.float32)


def permutation(count: int, seed: int, purpose: str, *counters: int) -> list[int]:
    """Draw a permutation of 0 .. count - 1, at the address (seed, purpose, counters)."""
    order: list[int] = generator(seed, purpose, *counters).permutation(count).tolist()
    return order


def choice(count: int, seed: int, purpose: str, *counters: int) -> int:
    """Draw one of 0 .. count - 1, all equally likely, at the address (seed, purpose, counters)."""
    return int(generator(seed, purpose, *counters).integers(count))
