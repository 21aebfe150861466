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
    @property
    def kind(self) -> str: ...  # names the function that computes the block

    @property
    def name(self) -> str: ...  # prefix of the names of its adapter's arrays

    @property
    def weights(self) -> Mapping[str, Any]: ...  # by name within the block


class Chain(Protocol):
    """A model whose blocks map `h` to the next `h` and all read `shared` (position tables), which takes no gradient."""

    @property
    def blocks(self) -> Sequence[Block]:
        """In the order of the forward pass."""

    @property
    def enter(self) -> Callable[..., tuple[Tree, Tree]]:
        """Maps the model's inputs to (h, shared). An `mx.array` has one row per sample; any other input is the same for all."""

    def block(self, kind: str) -> BlockFunction:
        """The function of this kind of block. It computes its Linears through `linear` and depends only on its arguments."""

    @property
    def leave(self) -> Callable[[Tree, Tree], Tree]:
        """Maps (h, shared) after the last block to the prediction, whose arrays have one row per sample."""
