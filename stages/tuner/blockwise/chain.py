"""A model as a chain of blocks: what training and the forward pass block by block need of it. Knows no architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx

Tree = Any  # an array, or tuples, lists and dicts of arrays
Arrays = dict[str, mx.array]
Linear = Callable[[str, Any, mx.array], mx.array]  # (name within the block, weight, x) -> y, with the adapter added
BlockFunction = Callable[[Mapping[str, Any], Tree, Tree, Linear], Tree]  # (weights, h, shared, linear) -> h


class Block(Protocol):
    """One block of a model, such as a transformer block. `name` is the prefix of its adapters' names. `kind` names the function
    that computes the block. Blocks of one kind share this function. `weights` maps names within the block to weights.
    """

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def weights(self) -> Mapping[str, Any]: ...


class Chain(Protocol):
    """A model as a sequence of blocks, for training with little memory. Each block maps its input `h` to the input of
    the next block. All blocks also read the same value `shared`, such as tables of rotary position embeddings. No
    gradient is computed for `shared`. Both `h` and `shared` may be arrays nested in tuples, lists and dicts.
    """

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks, in the order of the forward pass."""

    @property
    def enter(self) -> Callable[..., tuple[Tree, Tree]]:
        """The function that starts the forward pass. It takes the model's inputs as keyword arguments and returns (h,
        shared). h is the input of the first block. `shared` is read by all blocks. An input that is an MLX array has one
        row per sample along its first axis. Any other input is the same for all samples.
        """

    def block(self, kind: str) -> BlockFunction:
        """Return the function that computes blocks of this `kind`. Its arguments are `(weights, h, shared, linear)`,
        and it returns the output of a block. `weights` maps names within the block to weights. `h` is the input of the
        block. `shared` is the value that all blocks read. The function calls `linear(name, weight, x)` for each of its
        Linears. This call returns the output of the Linear, including its adapter. The output of the function must
        depend only on its arguments.
        """

    @property
    def leave(self) -> Callable[[Tree, Tree], Tree]:
        """The function that ends the forward pass. It takes (h, shared) and returns the model's prediction. h is the output of
        the last block. Every array of the prediction has one row per sample along its first axis.
        """
