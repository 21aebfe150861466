"""Random numbers as pure functions of (seed, purpose, counters), for example (7, "noise", step, sample).

So any step can be replayed alone, and a resumed run equals an unbroken one. Neither the number of workers nor the size of a
micro-batch changes the numbers of a sample. They are drawn with NumPy on the host, so that all backends get the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """Return a NumPy random generator that depends only on the arguments. Equal arguments give equal numbers on every
    machine. `seed` is an integer. `purpose` names the use of the numbers, such as "noise". Any further positional
    arguments (`*counters`) are integers, such as the step and the sample.

    The generator is Philox, keyed with the sha256 of the arguments.
    """
    text = ":".join([str(seed), purpose, *map(str, counters)])
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


def uniform(seed: int, purpose: str, *counters: int) -> float:
    """Return one random number `u`, `0 <= u < 1`. It depends only on the arguments. `seed` is an integer. `purpose`
    names the use of the number, such as "dropout". Any further positional arguments (`*counters`) are integers, such as
    the step and the sample.
    """
    return float(generator(seed, purpose, *counters).random())


def normal(shape: tuple[int, ...], seed: int, purpose: str, *counters: int) -> np.ndarray:
    """Return a float32 array of the shape `shape` with random numbers from the standard normal distribution. The
    numbers depend only on the arguments. `seed` is an integer. `purpose` names the use of the numbers, such as "noise".
    After `purpose`, the call may have any number of integers (`*counters`), such as the step and the sample in
    `normal((4, 8), 7, "noise", step, sample)`.
    """
    return generator(seed, purpose, *counters).standard_normal(shape, dtype=np.float32)


def permutation(count: int, seed: int, purpose: str, *counters: int) -> list[int]:
    """Return a list of the integers from 0 to `count - 1` in random order. The order depends only on the arguments.
    `seed` is an integer. `purpose` names the use of the order, such as "batches". After `purpose`, the call may have
    any number of integers (`*counters`), such as the epoch in `permutation(100, 7, "batches", epoch)`.
    """
    order: list[int] = generator(seed, purpose, *counters).permutation(count).tolist()
    return order


def choice(count: int, seed: int, purpose: str, *counters: int) -> int:
    """Return a random integer from 0 to `count - 1`. `count` is how many integers are possible; all are equally likely.
    The result depends only on the arguments. `seed` is an integer. `purpose` names the use of the result, such as
    "caption". Any further positional arguments (`*counters`) are integers, such as the step and the sample.
    """
    return int(generator(seed, purpose, *counters).integers(count))


def weighted_choice(weights: Sequence[float], seed: int, purpose: str, *counters: int) -> int:
    """Return a random index into `weights`, a sequence of numbers. An index is drawn in proportion to its weight. At
    least one weight must be above 0. The result depends only on the arguments. `seed` is an integer. `purpose` names
    the use of the index. Any further positional arguments (`*counters`) are integers, such as the step and the sample.

    For example, with the weights 3 and 1, index 0 is drawn in three of four calls on average.
    """
    ends = np.cumsum(np.asarray(weights, np.float64))
    return int(np.searchsorted(ends, uniform(seed, purpose, *counters) * ends[-1], side="right"))
