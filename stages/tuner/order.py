"""The order of training rows: full batches of similar shapes, as a function of (seed, batch number) alone.

Rows are drawn in passes. A pass draws each row once, or as often as its rate says. If the rows of a pass do not fill its last
batch, the first rows of the next passes fill it. So no batch is smaller than the others, and no row is left out. If every rate
is 1 and every pass fills a batch, each row is drawn equally often over any number of epochs, up to one draw. Otherwise a row is
drawn as often as its rate says, rounded, up to the draws that fill a batch. They are fewer than a batch has, but all of them may
be of one row. The difference does not grow with the number of epochs.

The rows of a batch have one shape if there are enough rows of that shape to fill a batch. Shapes with fewer rows share their
batches. Such a batch is divided by shape, and its parts are computed one after another.
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
    """A batch of training rows, or a part of it. A part holds the rows of the batch that have the same shape, such as
    the same image size. `epoch` is the epoch of the batch, counted from 0. `rows` are indices into the list of all
    training rows.
    """

    epoch: int
    rows: tuple[int, ...]


class Rates:
    """Count how often each training row occurs in each pass. A pass is one round over the rows. `Rates(rates, seed)`
    takes the average number of occurrences per pass for each row. `within(number)` returns the counts of one pass.

    If a rate is not a whole number, the count of a row differs between passes. Its occurrences are spread evenly over
    the passes. For all rows with the same rate together, the number of occurrences per pass varies by at most one.
    """

    def __init__(self, rates: Sequence[float], seed: int) -> None:
        """Prepare the counts. `rates` holds the average number of occurrences per pass for each row. For example, 2
        means twice in every pass, and 1/3 means once in three passes. `seed` determines in which passes a row with a
        fractional rate occurs.
        """
        self.rates, self._starts = np.asarray(rates, np.float64), np.zeros(len(rates))
        for number, rate in enumerate(dict.fromkeys(rates)):
            rows = np.flatnonzero(self.rates == rate)
            turns = draws.permutation(len(rows), seed, "turns", number) if rate % 1 else range(len(rows))
            self._starts[rows] = (np.asarray(turns) + 0.5) / len(rows)

    def before(self, number: int) -> np.ndarray:
        """Return how often each row occurs in all passes before pass `number`, as an int64 array (rows,). A pass is one
        round over the training rows. Passes are counted from 0.
        """
        found: np.ndarray = np.floor(self.rates * number + self._starts).astype(np.int64)
        return found

    def within(self, number: int) -> np.ndarray:
        """Return how often each row occurs in pass `number`, as an int64 array (rows,). A pass is one round over the
        training rows. Passes are counted from 0.
        """
        found: np.ndarray = self.before(number + 1) - self.before(number)
        return found


def share_batches(shapes: Sequence[Hashable], batch_size: int) -> list[list[int]]:
    """Divide training rows into groups. Each batch is later drawn from one group. Return one sorted list of row indices
    per group. `shapes` has the shape of each row, such as its image size. `batch_size` is the number of rows in a
    batch. If at least `batch_size` rows have the same shape, they form a group. All other rows form one common group,
    whose batches may mix shapes.

    If the common group has fewer than `batch_size` rows, the rows of the smallest other groups are added until it has
    enough.
    """
    by_shape: dict[Hashable, list[int]] = {}
    for row, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(row)
    large = sorted((rows for rows in by_shape.values() if len(rows) >= batch_size), key=len, reverse=True)
    shared = [row for rows in by_shape.values() if len(rows) < batch_size for row in rows]
    while shared and len(shared) < batch_size and large:
        shared += large.pop()
    return sorted([*large, sorted(shared)] if shared else large)


class Order:
    """The order in which a training run draws its rows, as batches of `batch_size` rows. `step(n)` returns the batches
    of training step `n`, from 1. `epoch(n)` returns those of epoch `n`, from 0. The order depends only on the arguments
    of the constructor.

    Any step is computed directly, without drawing earlier steps. A run may have any number of steps. A row occurs twice
    in a batch only if too few rows can share the batch, or if its rate is above 1.
    """

    def __init__(
        self,
        shapes: Sequence[Hashable],
        batch_size: int,
        seed: int,
        accumulate: int = 1,
        rates: Sequence[float] | None = None,
    ) -> None:
        """Prepare the order of the training rows. `shapes` has one hashable shape per row, and rows of equal shape can
        share a batch. `batch_size` is the number of rows in a batch. `seed`, an integer, determines the shuffling.
        `accumulate` is the number of batches in a training step. `rates` has the average number of occurrences per
        epoch for each row. None means that every row occurs once per epoch.
        """
        assert shapes, "there are no training rows"
        assert rates is None or (len(rates) == len(shapes) and min(rates) >= 0 and max(rates) > 0), rates
        self.shapes, self.batch_size, self.seed, self.accumulate = list(shapes), batch_size, seed, accumulate
        self.rates = Rates([1.0] * len(shapes) if rates is None else rates, seed)
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
        """Return the batches of one training step as a list. Steps are counted from 1. A step has `accumulate` batches.
        A batch with rows of several shapes is split into one `Batch` per shape.
        """
        first = (step - 1) * self.accumulate
        return [part for n in range(self.accumulate) for part in self._parts(self.batch_at(first + n))]

    def batch_at(self, number: int) -> Batch:
        """Return the batch with this number. Batches are counted from 0 and over all epochs."""
        epoch = self._last_epoch  # usually that of the call before
        if not self._batches_before(epoch) <= number < self._batches_before(epoch + 1):
            most = 1
            while self._batches_before(most) <= number:
                most *= 2
            epoch = self._last_epoch = bisect.bisect_right(range(most), number, key=self._batches_before) - 1
        return self._epoch(epoch)[number - self._batches_before(epoch)]

    def epoch(self, epoch: int) -> list[Batch]:
        """Return the batches of one epoch in shuffled order, as a list. `epoch` is the epoch's number, from 0.

        The last batch of an epoch is filled up with the first rows of the next epoch. The next epoch does not draw these
        rows again. So the list of a small epoch may be empty.
        """
        batches: list[tuple[int, ...]] = []
        for group in range(len(self.groups)):
            start, stop = (-(-self._drawn(n)[group] // self.batch_size) * self.batch_size for n in (epoch, epoch + 1))
            rows: list[int] = []
            at = epoch
            skipped = start - self._drawn(epoch)[group]  # already drawn, to fill a batch
            while len(rows) < skipped + stop - start:
                rows += self._pass(group, at)
                at += 1
            rows = rows[skipped : skipped + stop - start]
            batches += [tuple(rows[n : n + self.batch_size]) for n in range(0, len(rows), self.batch_size)]
        return [Batch(epoch, batches[n]) for n in draws.permutation(len(batches), self.seed, "batches", epoch)]

    def most(self, shape: Hashable) -> int:
        """Return an upper bound: a batch never has more rows of the shape `shape` than this number. `shape` is a shape
        that was given to the constructor, such as an image size. For example, batches have 4 rows, and three shapes
        have 10, 3 and 2 rows. If each row occurs once per epoch, the results for the three shapes are 4, 3 and 2. The
        first shape can fill a batch of 4 rows. The other shapes have only 3 and 2 rows.

        The argument `rates` of the constructor has the average number of occurrences per epoch for each row. A row that
        occurs twice in a batch counts twice. So rates other than 1, or too few rows to fill a batch, can make the bound
        larger than the number of rows with the shape. The bound is at most the number of rows in a batch. Rows with
        rate 0 are never drawn. At least one row of `shape` must have a rate above 0.
        """
        group = next(rows for rows in self.groups if any(self.shapes[row] == shape for row in rows))
        if all(self.shapes[row] == shape for row in group):
            return self.batch_size
        own: int = sum(math.ceil(self.rates.rates[row]) for row in group if self.shapes[row] == shape)
        least = int(np.floor(self.rates.rates[group]).sum())  # rows of every pass
        if least >= self.batch_size and self.rates.rates.max() <= 1:
            return min(self.batch_size, own)  # no row occurs twice in a batch
        passes = 1 + -(-(self.batch_size - 1) // least) if least else self.batch_size
        return min(self.batch_size, own * passes)

    @property
    def sharing(self) -> list[Hashable]:
        """The shapes whose rows may share a batch with rows of other shapes, as a list. A shape is, for example, an
        image size. In general, the list has the shapes with fewer rows than one batch. For example, batches have 4
        rows, and three shapes have 10, 3 and 2 rows. Then the list has the second and the third shape. The first shape
        has enough rows for batches of its own.

        In the example, 8 rows of the first shape fill two batches. The other 2 rows come into a batch with rows of the
        same shape from the next epoch. Shapes with fewer rows than a batch form one group, and a batch of this group
        may contain rows of several shapes. If the group has fewer rows than a batch, the smallest of the remaining
        shapes are added to it. The list is empty if the group has fewer than two shapes. Rows with rate 0 are never
        drawn, and do not count.
        """
        shapes = [list(dict.fromkeys(self.shapes[row] for row in rows)) for rows in self.groups]
        return [shape for found in shapes if len(found) > 1 for shape in found]

    def _parts(self, batch: Batch) -> list[Batch]:
        by_shape: dict[Hashable, list[int]] = {}
        for row in batch.rows:
            by_shape.setdefault(self.shapes[row], []).append(row)
        return [Batch(batch.epoch, tuple(rows)) for rows in by_shape.values()]

    def _drawn_before(self, epoch: int) -> list[int]:
        """Return how many rows of each group are drawn in all passes before pass `epoch`. A pass is one round over the
        training rows, counted from 0. A group holds rows that share batches. The result is a list with one number per
        group.
        """
        counts = self.rates.before(epoch)
        return [int(counts[rows].sum()) for rows in self.groups]

    def _batches(self, epoch: int) -> int:
        """Return the number of batches in all epochs before `epoch`, summed over all groups of rows."""
        return sum(-(-count // self.batch_size) for count in self._drawn(epoch))

    def _pass_rows(self, group: int, number: int) -> list[int]:
        """Return the rows that one pass draws from one group, in shuffled order. `group` is the number of the group: a
        set of rows from which batches are filled. `number` is the number of the pass, from 0. A pass draws all rows of
        the group. For example, a group has the rows 2, 5 and 7. Then pass 0 may give [5, 2, 7], and pass 1 may give [7,
        5, 2]. A row is an index into the list of all training rows.

        If the rates of the rows are not 1, a pass draws each row as often as its rate says.
        """
        start, open_batch = number, self._open_batch(group, number)
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
        """Return the rows of the batch that is partly filled when a pass begins, as a list. `group` is the number of a
        group: a set of rows from which batches are filled. `number` is the number of the pass, from 0. For example, a
        group has 6 rows, and a batch has 4. Pass 0 fills one batch and puts 2 rows into the next. For `number` = 1, the
        result is these 2 rows. The result is [] if no batch is partly filled, and None if the rows are not known.

        A pass draws each row of the group once, or as often as the row's rate says. The rows of the result are known if
        pass `number` - 1 was the last pass of this group that was computed. If the result is None, the caller must
        compute earlier passes first.
        """
        if self._drawn(number)[group] % self.batch_size == 0:
            return []
        known, open_batch = self._last_open.get(group, (-1, []))
        return open_batch if known == number else None

    def _arranged(self, group: int, number: int, open_batch: Sequence[int]) -> list[int]:
        """Return the rows that one pass draws from one group, in shuffled order. A row is an index into the list of all
        training rows. `group` is the number of the group: a set of rows from which batches are filled. `number` is the
        number of the pass, from 0. `open_batch` holds the rows of a batch that earlier passes have left partly filled,
        or is empty. For example, a batch has 4 rows, and the rows in `open_batch` are 3 and 5. Then the first 2 rows of
        the result complete the batch.

        As far as possible, these first rows are rows that `open_batch` does not contain. The rows of `open_batch` are
        not returned, unless this pass draws them again. A pass draws each row of the group once, or as often as the
        row's rate says.
        """
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
