"""Visit the blocks of a model one after another. Weights that are stored on disk are read one block ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx

from stages.tuner.blockwise.device import dispatch
from stages.tuner.stored import StoredWeight, read_all


class Visit:
    """A visit of some blocks of a model, in a given order. Iterating yields the index of each block. During its visit,
    the attribute `weights` holds the block's weights by name. The caller computes the block and passes the results to
    `dispatch`.

    If weights are stored on disk, those of the next block are read while a block is computed. At most two blocks then
    have their weights in memory. The caller must not keep `weights`.
    """

    def __init__(self, blocks: Sequence[Any], order: Iterable[int], after: tuple[Any, ...] = ()) -> None:
        """Prepare the visit of those blocks of `blocks` whose indices are in `order`. `after` are the results of what
        was dispatched just before.
        """
        self.blocks, self.order = blocks, list(order)
        self.stored = any(isinstance(weight, StoredWeight) for n in self.order for weight in blocks[n].weights.values())
        self.at = 0
        self.weights: Mapping[str, Any] = {}
        self.ahead: Mapping[str, Any] = {}
        self.running = after

    def __iter__(self) -> Iterator[int]:
        for at, n in enumerate(self.order):
            self.at = at
            self.weights, self.ahead = self.ahead or read_all(self.blocks[n].weights), {}
            yield n
        self.weights = {}

    def dispatch(self, *results: Any) -> None:
        """Start computing the results of the present block, without waiting for them. If weights are stored on disk, wait
        for the results of the previous block, so that its weights are freed. Then start reading the next block's.
        """
        dispatch(*results)
        if not self.stored:
            return
        mx.eval(*self.running)
        self.running = results
        if self.at + 1 < len(self.order):
            self.ahead = read_all(self.blocks[self.order[self.at + 1]].weights)
            dispatch(self.ahead)
