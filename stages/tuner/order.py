"""Which rows a step trains on: batches of one shape each, and an order that is a function of (seed, epoch) alone.

In every epoch each row comes exactly once, or as often as its rate says. A bucket's last batch may be smaller: padding it
would repeat rows, dropping it would lose some in every epoch.
"""

from __future__ import annotations

import bisect
import functools
import math
import threading
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from stages.tuner import draws


@dataclass(frozen=True)
class Batch:
    """One micro-batch: the pass over the data that it belongs to, and its rows by their place in the list of rows."""

    epoch: int
    rows: tuple[int, ...]


def counts(rates: Sequence[float], seed: int, epoch: int) -> list[int]:
    """How often each row comes in an epoch, for rates of occurrences per epoch.

    A rate of 2 is twice in every epoch, one of 1/3 once in three. Rows of one rate take turns: each comes evenly over the
    epochs, and every epoch has as many of them as any other, give or take one.
    """
    found = [0] * len(rates)
    alike: dict[float, list[int]] = {}
    for row, rate in enumerate(rates):
        alike.setdefault(rate, []).append(row)
    for number, (rate, rows) in enumerate(alike.items()):
        turns = draws.permutation(len(rows), seed, "turns", number) if rate % 1 else range(len(rows))
        for row, turn in zip(rows, turns, strict=True):
            start = (turn + 0.5) / len(rows)
            found[row] = math.floor(rate * (epoch + 1) + start) - math.floor(rate * epoch + start)
    return found


def plan(shapes: Sequence[Hashable], batch_size: int, seed: int, epoch: int, rates: Sequence[float] | None = None) -> list[Batch]:
    """The batches of one epoch in order, for rows of these shapes. The rows' own order must be stable."""
    times = counts(rates, seed, epoch) if rates is not None else [1] * len(shapes)
    buckets: dict[Hashable, list[int]] = {}
    for row, shape in enumerate(shapes):
        buckets.setdefault(shape, []).extend([row] * times[row])
    found: list[tuple[int, ...]] = []
    for number, rows in enumerate(buckets.values()):
        order = draws.permutation(len(rows), seed, "order", epoch, number)
        mixed = [rows[n] for n in order]
        found += [tuple(mixed[start : start + batch_size]) for start in range(0, len(mixed), batch_size)]
    return [Batch(epoch, found[n]) for n in draws.permutation(len(found), seed, "batches", epoch)]


class Order:
    """All steps of a run, however long, each found at once."""

    def __init__(
        self,
        shapes: Sequence[Hashable],
        batch_size: int,
        seed: int,
        accumulate: int = 1,
        rates: Sequence[float] | None = None,
    ) -> None:
        """`accumulate` micro-batches make a step. `rates`: occurrences of each row per epoch; None: 1 each."""
        assert shapes, "there is nothing to put in order"
        assert rates is None or (len(rates) == len(shapes) and min(rates) >= 0 and max(rates) > 0), rates
        self.batch_size, self.accumulate = batch_size, accumulate
        self._epoch = functools.lru_cache(maxsize=4)(lambda epoch: plan(shapes, batch_size, seed, epoch, rates))
        self._size = functools.partial(_batches, shapes, batch_size, seed, rates=rates)
        self._even = rates is None or all(rate % 1 == 0 for rate in rates)  # then every epoch is as long as the first
        self._ends = [self._size(0)]  # the number of batches up to and with each epoch
        self._lock = threading.Lock()  # steps are asked for ahead, in another thread
        self.per_epoch = self._ends[0]

    def batch_at(self, number: int) -> Batch:
        """The micro-batch of that number, counted from 0 over all epochs."""
        if self._even:
            epoch, place = divmod(number, self.per_epoch)
            return self._epoch(epoch)[place]
        with self._lock:
            while self._ends[-1] <= number:
                self._ends.append(self._ends[-1] + self._size(len(self._ends)))
        epoch = bisect.bisect_right(self._ends, number)
        return self._epoch(epoch)[number - (self._ends[epoch - 1] if epoch else 0)]

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of a step, counted from 1."""
        first = (step - 1) * self.accumulate
        return [self.batch_at(first + n) for n in range(self.accumulate)]


def _batches(shapes: Sequence[Hashable], batch_size: int, seed: int, epoch: int, rates: Sequence[float] | None) -> int:
    """How many batches an epoch has, without drawing their order."""
    times = counts(rates, seed, epoch) if rates is not None else [1] * len(shapes)
    rows: Counter[Hashable] = Counter()
    for shape, count in zip(shapes, times, strict=True):
        rows[shape] += count
    return sum(math.ceil(count / batch_size) for count in rows.values())
