"""Visit the blocks of a model one after another. Weights that are stored on disk are read one block ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx

from stages.tuner.blockwise.device import dispatch
from stages.tuner.stored import StoredWeight, read_all


class Visit:
    """A loop over blocks of a model, which loads their weights. In the loop `for n in visit`, `n` is the index of one
    block after another. The attribute `visit.weights` then holds the weights of block `n` by name. The caller computes
    the output of the block with these weights, and calls `visit.dispatch(output)`. MLX computes arrays lazily, and this
    call starts the computation without waiting for it.

    If weights are stored on disk, those of the next block are read while a block is computed. At most two blocks then
    have their weights in memory. The caller must not keep `weights`.
    """

    def __init__(self, blocks: Sequence[Any], order: Iterable[int], after: tuple[Any, ...] = ()) -> None:
        """Set up a loop over blocks of a model, without reading weights. `blocks` are all blocks of the model. `order`
        gives the indices of the blocks to visit. `after` holds arrays whose computation began before the loop, such as
        the loss and gradients of other blocks. MLX may still be computing these arrays when the loop begins.

        `after` has an effect only if weights are stored on disk. The first call of `dispatch` then waits for the arrays
        in `after`, and starts reading the weights of the second block afterwards. This limits how many weights are in
        memory.
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
        """Start computing the arrays `results`, and do not wait for them. The arguments `results` are the arrays that
        the caller has built from the weights of the present block, such as the output of this block. If weights are
        stored on disk, also start reading the weights of the next block.

        Before this reading starts, the call waits for the results of the previous block. The weights of the previous
        block are then freed.
        """
        dispatch(*results)
        if not self.stored:
            return
        mx.eval(*self.running)
        self.running = results
        if self.at + 1 < len(self.order):
            self.ahead = read_all(self.blocks[self.order[self.at + 1]].weights)
            dispatch(self.ahead)
