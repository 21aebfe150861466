"""A loop over the blocks of a model that reads weights stored on disk one block ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx

from stages.tuner.blockwise.device import dispatch
from stages.tuner.stored import StoredWeight, read_all


class Visit:
    """`for n in visit`: `visit.weights` has block n's weights, which must not be kept; `visit.dispatch(output)` starts it."""

    def __init__(self, blocks: Sequence[Any], order: Iterable[int], after: tuple[Any, ...] = ()) -> None:
        self.blocks, self.order = blocks, list(order)
        self.stored = any(isinstance(weight, StoredWeight) for n in self.order for weight in blocks[n].weights.values())
        self.at = 0
        self.weights: Mapping[str, Any] = {}
        self.ahead: Mapping[str, Any] = {}
        # Computed before a second block is read from disk, as they may need the weights of other blocks: at most two blocks
        # have theirs in memory.
        self.running = after

    def __iter__(self) -> Iterator[int]:
        for at, n in enumerate(self.order):
            self.at = at
            self.weights, self.ahead = self.ahead or read_all(self.blocks[n].weights), {}
            yield n
        self.weights = {}

    def dispatch(self, *results: Any) -> None:
        """Starts computing arrays made from the present block's weights, and reading the next block."""
        dispatch(*results)
        if not self.stored:
            return
        # The previous block's results are computed, so its weights are freed before the next block's are read.
        mx.eval(*self.running)
        self.running = results
        if self.at + 1 < len(self.order):
            self.ahead = read_all(self.blocks[self.order[self.at + 1]].weights)
            dispatch(self.ahead)
