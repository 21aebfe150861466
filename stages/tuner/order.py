"""The order of training rows: full batches of similar shapes, as a function of (seed, batch number) alone.

Rows are drawn in passes. A pass draws each row once, or as often as its rate says. If the rows of a pass do not fill
its last batch, the first rows of the next passes fill it. So no batch is smaller than the others, and no row is left
out; over any number of epochs, a row is drawn as often as its rate says, up to rounding and the draws that fill one
batch.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from stages.tuner import draws


@dataclass(frozen=True)
class Batch:
    """A batch, or those of its rows that have one shape."""

    epoch: int  # from 0
    rows: tuple[int, ...]  # indices into all training rows


class Rates:
    """How often each row occurs in each pass. A rate of 1/3 is once in three passes."""

    def __init__(self, rates: Sequence[float], seed: int) -> None:
        self.rates, self._starts = np.asarray(rates, np.float64), np.zeros(len(rates))
        for number, rate in enumerate(dict.fromkeys(rates)):
            rows = np.flatnonzero(self.rates == rate)
            # Evenly spaced phases in random order: rows of one rate together vary by at most one occurrence between passes.
            turns = draws.permutation(len(rows), seed, "turns", number) if rate % 1 else range(len(rows))
            self._starts[rows] = (np.asarray(turns) + 0.5) / len(rows)

    def before(self, number: int) -> np.ndarray:
        """Occurrences in all passes before this one, int64 (rows,)."""
        found: np.ndarray = np.floor(self.rates * number + self._starts).astype(np.int64)
        return found

    def within(self, number: int) -> np.ndarray:
        found: np.ndarray = self.before(number + 1) - self.before(number)
        return found


def share_batches(shapes: Sequence[Hashable], batch_size: int) -> list[list[int]]:
    """Groups of rows that may share a batch: each shape with at least `batch_size` rows, and one group of all other shapes."""
    by_shape: dict[Hashable, list[int]] = {}
    for row, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(row)
    large = sorted((rows for rows in by_shape.values() if len(rows) >= batch_size), key=len, reverse=True)
    shared = [row for rows in by_shape.values() if len(rows) < batch_size for row in rows]
    # A common group too small for a batch takes in the smallest other groups.
    while shared and len(shared) < batch_size and large:
        shared += large.pop()
    return sorted([*large, sorted(shared)] if shared else large)


class Order:
    """Any step is computed directly. A row is twice in a batch only if too few rows can share it, or its rate is above 1."""

    def __init__(
        self,
        shapes: Sequence[Hashable],  # of each row
        batch_size: int,
        seed: int,
        accumulate: int = 1,  # batches per step
        rates: Sequence[float] | None = None,  # mean draws of each row per epoch; None: 1
    ) -> None:
        assert shapes, "there are no training rows"
        assert rates is None or (len(rates) == len(shapes) and min(rates) >= 0 and max(rates) > 0), rates
        self.shapes, self.batch_size, self.seed, self.accumulate = list(shapes), batch_size, seed, accumulate
        self.rates = Rates([1.0] * len(shapes) if rates is None else rates, seed)
        # Rows of rate 0 are never drawn, and must not make a group.
        drawn = [row for row in range(len(shapes)) if self.rates.rates[row]]
        groups = share_batches([shapes[row] for row in drawn], batch_size)
        self.groups = [np.array([drawn[n] for n in rows]) for rows in groups]
        self.per_epoch = float(self.rates.rates.sum()) / batch_size  # batches, on average
        # Caches. A thread that finds another thread's entry computes equal rows.
        self._drawn = functools.lru_cache(maxsize=256)(self._drawn_before)
        self._batches_before = functools.lru_cache(maxsize=256)(self._batches)
        self._pass = functools.lru_cache(maxsize=4 * len(groups))(self._pass_rows)
        self._last_open: dict[int, tuple[int, list[int]]] = {}  # group -> (pass, rows of the batch that it begins in)
        self._last_epoch = 0
        self._epoch = functools.lru_cache(maxsize=4)(self.epoch)

    def step(self, step: int) -> list[Batch]:
        """The batches of a step (from 1), each split by shape."""
        first = (step - 1) * self.accumulate
        return [part for n in range(self.accumulate) for part in self._parts(self.batch_at(first + n))]

    def batch_at(self, number: int) -> Batch:
        """The batch with this number, from 0, over all epochs."""
        epoch = self._last_epoch  # usually that of the call before
        if not self._batches_before(epoch) <= number < self._batches_before(epoch + 1):
            # Epochs differ in length: double until one is past the batch, then bisect.
            most = 1
            while self._batches_before(most) <= number:
                most *= 2
            epoch = self._last_epoch = bisect.bisect_right(range(most), number, key=self._batches_before) - 1
        return self._epoch(epoch)[number - self._batches_before(epoch)]

    def epoch(self, epoch: int) -> list[Batch]:
        """The shuffled batches of an epoch (from 0). Rows that filled the last batch of the epoch before are not drawn again."""
        batches: list[tuple[int, ...]] = []
        for group in range(len(self.groups)):
            # Numbers of draws at which the batches of this epoch begin and end, rounded up to full batches.
            start, stop = (-(-self._drawn(n)[group] // self.batch_size) * self.batch_size for n in (epoch, epoch + 1))
            rows: list[int] = []
            at = epoch
            skipped = start - self._drawn(epoch)[group]  # already drawn, to fill a batch
            # A small group may need several passes to fill one batch.
            while len(rows) < skipped + stop - start:
                rows += self._pass(group, at)
                at += 1
            rows = rows[skipped : skipped + stop - start]
            batches += [tuple(rows[n : n + self.batch_size]) for n in range(0, len(rows), self.batch_size)]
        return [Batch(epoch, batches[n]) for n in draws.permutation(len(batches), self.seed, "batches", epoch)]

    def most(self, shape: Hashable) -> int:
        """Upper bound on the rows of this shape (of rate > 0) in a batch. A row that occurs twice counts twice."""
        group = next(rows for rows in self.groups if any(self.shapes[row] == shape for row in rows))
        if all(self.shapes[row] == shape for row in group):
            return self.batch_size
        own: int = sum(math.ceil(self.rates.rates[row]) for row in group if self.shapes[row] == shape)
        least = int(np.floor(self.rates.rates[group]).sum())  # rows of every pass
        if least >= self.batch_size and np.max(self.rates.rates) <= 1:
            return min(self.batch_size, own)  # no row occurs twice in a batch
        # A batch can meet so many passes, and each may draw a row again.
        passes = 1 + -(-(self.batch_size - 1) // least) if least else self.batch_size
        return min(self.batch_size, own * passes)

    @property
    def sharing(self) -> list[Hashable]:
        shapes = [list(dict.fromkeys(self.shapes[row] for row in rows)) for rows in self.groups]
        return [shape for found in shapes if len(found) > 1 for shape in found]

    def _parts(self, batch: Batch) -> list[Batch]:
        # A batch of the common group: its parts are computed one after another.
        by_shape: dict[Hashable, list[int]] = {}
        for row in batch.rows:
            by_shape.setdefault(self.shapes[row], []).append(row)
        return [Batch(batch.epoch, tuple(rows)) for rows in by_shape.values()]

    def _drawn_before(self, epoch: int) -> list[int]:
        counts = self.rates.before(epoch)
        return [int(counts[rows].sum()) for rows in self.groups]

    def _batches(self, epoch: int) -> int:
        return sum(-(-count // self.batch_size) for count in self._drawn(epoch))

    def _pass_rows(self, group: int, number: int) -> list[int]:
        start, open_batch = number, self._open_batch(group, number)
        # What completes a batch depends on the pass before: go back to a pass that begins with a full batch or a known one.
        while open_batch is None:
            start -= 1
            open_batch = self._open_batch(group, start)
        for at in range(start, number + 1):
            rows = self._arranged(group, at, open_batch)
            open_batch = [*open_batch, *rows]
            open_batch = open_batch[len(open_batch) - len(open_batch) % self.batch_size :]
        self._last_open[group] = number + 1, open_batch
        return rows

    def _open_batch(self, group: int, number: int) -> list[int] | None:
        """Rows of the batch that is partly filled when a pass begins; None if the pass before was not the last one computed."""
        if self._drawn(number)[group] % self.batch_size == 0:
            return []
        known, open_batch = self._last_open.get(group, (-1, []))
        return open_batch if known == number else None

    def _arranged(self, group: int, number: int, open_batch: Sequence[int]) -> list[int]:
        """The rows of a pass, shuffled. The first complete `open_batch`, with rows that it lacks as far as possible."""
        counts = self.rates.within(number)[self.groups[group]]
        rows = np.repeat(self.groups[group], counts)
        # The occurrences of a row are spread over the pass: the n-th of m lies in the n-th of m equal parts.
        nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = (nth + draws.generator(self.seed, "order", number, group).random(len(rows))) / np.repeat(counts, counts)
        shuffled: list[int] = rows[np.argsort(places, kind="stable")].tolist()
        missing = self.batch_size - len(open_batch) if open_batch else 0
        taken = set(open_batch)
        first = [n for n, row in enumerate(shuffled) if row not in taken][:missing]
        chosen = set(first)
        return [shuffled[n] for n in first] + [row for n, row in enumerate(shuffled) if n not in chosen]
