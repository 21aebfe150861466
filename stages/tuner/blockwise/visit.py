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
        gives the indices of the blocks to visit. `after` holds arrays that MLX may still be computing, such as the loss
        and gradients of other blocks. If weights are stored on disk, the first call of `dispatch` waits until the
        arrays in `after` are computed. Then `dispatch` starts reading the weights of the second block.

        Waiting limits how many weights are in memory, because the arrays in `after` may need weights of other blocks.
        If no weights are stored on disk, `after` has no effect.
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
        """Start computing arrays, and do not wait for them. The positional arguments (`*results`) are these arrays, for
        example `visit.dispatch(output)`. The caller has built the arrays from the weights of the present block. If
        weights are stored on disk, also start reading the weights of the next block.

        Before this reading starts, the call waits for the results of the previous block. The weights of the previous
        block are then freed. The first call waits for the arrays `after` that the constructor was given.
        """
        dispatch(*results)
        if not self.stored:
            return
        mx.eval(*self.running)
        self.running = results
        if self.at + 1 < len(self.order):
            self.ahead = read_all(self.blocks[self.order[self.at + 1]].weights)
            dispatch(self.ahead)
