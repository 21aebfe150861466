"""The order of training rows: batches of one shape each, as a function of (seed, epoch) alone.

In every epoch each row occurs exactly once, or as often as its rate says. The last batch of a shape may be smaller, because
padding would repeat rows, and dropping the batch would lose some rows in every epoch.
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
    """A batch of training rows. `epoch` is the epoch of the batch, counted from 0. `rows` are indices into the list of all
    training rows.
    """

    epoch: int
    rows: tuple[int, ...]


def occurrences(rates: Sequence[float], seed: int, epoch: int) -> list[int]:
    """Return how often each row occurs in one epoch, as a list with one count per row. `rates` has each row's average number of
    occurrences per epoch: 2 is twice in every epoch, 1/3 is once in three epochs. `epoch` is counted from 0. Equal arguments give
    equal counts.

    Rows with the same fractional rate take turns. So each of them occurs evenly over the epochs. Their number per epoch varies by
    at most one.
    """
    counts = [0] * len(rates)
    rows_of_rate: dict[float, list[int]] = {}
    for row, rate in enumerate(rates):
        rows_of_rate.setdefault(rate, []).append(row)
    for number, (rate, rows) in enumerate(rows_of_rate.items()):
        turns = draws.permutation(len(rows), seed, "turns", number) if rate % 1 else range(len(rows))
        for row, turn in zip(rows, turns, strict=True):
            start = (turn + 0.5) / len(rows)
            counts[row] = math.floor(rate * (epoch + 1) + start) - math.floor(rate * epoch + start)
    return counts


def epoch_batches(
    shapes: Sequence[Hashable], batch_size: int, seed: int, epoch: int, rates: Sequence[float] | None = None
) -> list[Batch]:
    """Return the batches of one epoch in shuffled order. All rows of a batch have the same shape. `shapes` has the shape of each
    training row. `batch_size` is the most rows of a batch. `epoch` is counted from 0. `rates` has each row's average number of
    occurrences per epoch. If `rates` is None, every row occurs once.
    """
    times = occurrences(rates, seed, epoch) if rates is not None else [1] * len(shapes)
    buckets: dict[Hashable, list[int]] = {}
    for row, shape in enumerate(shapes):
        buckets.setdefault(shape, []).extend([row] * times[row])
    batches: list[tuple[int, ...]] = []
    for number, rows in enumerate(buckets.values()):
        order = draws.permutation(len(rows), seed, "order", epoch, number)
        shuffled = [rows[n] for n in order]
        batches += [tuple(shuffled[start : start + batch_size]) for start in range(0, len(shuffled), batch_size)]
    return [Batch(epoch, batches[n]) for n in draws.permutation(len(batches), seed, "batches", epoch)]


class Order:
    """The order in which a run trains on its rows. It depends only on the arguments of the constructor. The batches of any step
    are computed directly, without drawing earlier steps. A run may have any number of steps.
    """

    def __init__(
        self,
        shapes: Sequence[Hashable],
        batch_size: int,
        seed: int,
        accumulate: int = 1,
        rates: Sequence[float] | None = None,
    ) -> None:
        """Prepare the order. `shapes` has the shape of each training row. All rows of a batch have equal shapes. `batch_size` is
        the most rows of a batch. `seed` determines the shuffling. `accumulate` is the number of batches in a step. `rates` has
        each row's average number of occurrences per epoch. If `rates` is None, every row occurs once.
        """
        assert shapes, "there are no training rows"
        assert rates is None or (len(rates) == len(shapes) and min(rates) >= 0 and max(rates) > 0), rates
        self.batch_size, self.accumulate = batch_size, accumulate
        self._epoch = functools.lru_cache(maxsize=4)(lambda epoch: epoch_batches(shapes, batch_size, seed, epoch, rates))
        self._batch_count = functools.partial(_batch_count, shapes, batch_size, seed, rates=rates)
        self._equal_epochs = rates is None or all(rate % 1 == 0 for rate in rates)
        self._ends = [self._batch_count(0)]  # the number of batches up to and with each epoch
        self._lock = threading.Lock()  # the data loader's thread reads steps too
        self.per_epoch = self._ends[0]

    def batch_at(self, number: int) -> Batch:
        """Return the batch with this number. Batches are counted from 0 and over all epochs."""
        if self._equal_epochs:
            epoch, place = divmod(number, self.per_epoch)
            return self._epoch(epoch)[place]
        with self._lock:
            while self._ends[-1] <= number:
                self._ends.append(self._ends[-1] + self._batch_count(len(self._ends)))
        epoch = bisect.bisect_right(self._ends, number)
        return self._epoch(epoch)[number - (self._ends[epoch - 1] if epoch else 0)]

    def step(self, step: int) -> list[Batch]:
        """Return the batches of one step. There are `accumulate` of them. Steps are counted from 1."""
        first = (step - 1) * self.accumulate
        return [self.batch_at(first + n) for n in range(self.accumulate)]


def _batch_count(shapes: Sequence[Hashable], batch_size: int, seed: int, epoch: int, rates: Sequence[float] | None) -> int:
    """Return the number of batches of one epoch, without drawing their order. The arguments are those of `epoch_batches`."""
    times = occurrences(rates, seed, epoch) if rates is not None else [1] * len(shapes)
    rows: Counter[Hashable] = Counter()
    for shape, count in zip(shapes, times, strict=True):
        rows[shape] += count
    return sum(math.ceil(count / batch_size) for count in rows.values())
