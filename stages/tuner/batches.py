"""Which rows a step trains on: batches of one shape each, and an order that is a function of (seed, epoch) alone.

In every epoch each row comes exactly once. A bucket's last batch may be smaller: padding it would repeat rows, dropping
it would lose some in every epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from stages.tuner import draws


@dataclass(frozen=True)
class Batch:
    """One micro-batch: the pass over the data that it belongs to, and its rows by their place in the list of rows."""

    epoch: int
    rows: tuple[int, ...]


def plan(shapes: Sequence[Hashable], batch_size: int, seed: int, epoch: int) -> list[Batch]:
    """The batches of one epoch in order, for rows of these shapes. The rows' own order must be stable."""
    buckets: dict[Hashable, list[int]] = {}
    for row, shape in enumerate(shapes):
        buckets.setdefault(shape, []).append(row)
    found: list[tuple[int, ...]] = []
    for number, rows in enumerate(buckets.values()):
        order = draws.permutation(len(rows), seed, "order", epoch, number)
        mixed = [rows[n] for n in order]
        found += [tuple(mixed[start : start + batch_size]) for start in range(0, len(mixed), batch_size)]
    return [Batch(epoch, found[n]) for n in draws.permutation(len(found), seed, "batches", epoch)]


class Order:
    """All steps of a run, however long, each found at once."""

    def __init__(self, shapes: Sequence[Hashable], batch_size: int, seed: int, accumulate: int = 1) -> None:
        """`accumulate` micro-batches make a step."""
        assert shapes, "there is nothing to put in order"
        self.accumulate = accumulate
        self._epoch = functools.lru_cache(maxsize=4)(lambda epoch: plan(shapes, batch_size, seed, epoch))
        self.per_epoch = len(self._epoch(0))

    def batch_at(self, number: int) -> Batch:
        """The micro-batch of that number, counted from 0 over all epochs."""
        epoch, place = divmod(number, self.per_epoch)
        return self._epoch(epoch)[place]

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of a step, counted from 1."""
        first = (step - 1) * self.accumulate
        return [self.batch_at(first + n) for n in range(self.accumulate)]
