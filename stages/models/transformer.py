"""What the transformers of pictures share: their weights by block, and the forward pass block after block.

B batch, S rows of the stream, D hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import mlx.core as mx
import numpy as np

from stages import kernels
from stages.models.attention import plain_linear
from stages.models.family import Block, Linear
from stages.models.folders import checked_sizes
from stages.models.layers import EPS, RotaryTables

Shapes = dict[str, tuple[int, ...]]
Shared = dict[str, Any]  # what all blocks receive: modulations and rotary tables, lists of arrays
Streams = mx.array | tuple[mx.array, ...]  # one array per stream, (B, rows, D), before the blocks that all pass through together
BlockFunction = Callable[..., Streams]  # (weights, h, shared, linear) -> h


@dataclass(frozen=True)
class FluxConfig:
    """What the configs of FLUX.2 and FLUX 3 share. Fields have the names and meanings of the keys in config.json."""

    model: ClassVar[str]  # in messages

    in_channels: int
    num_layers: int
    num_single_layers: int
    attention_head_dim: int
    num_attention_heads: int
    joint_attention_dim: int
    mlp_ratio: float
    axes_dims_rope: tuple[int, ...]
    rope_theta: float
    eps: float

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Raises ValueError if a key is missing or a value is not supported. Unknown keys are ignored."""
        made = cls(**checked_sizes(cls, config, "the transformer's config", cls.model))
        axes, width = made.axes_dims_rope, made.attention_head_dim
        if sum(axes) != width:
            raise ValueError(f"axes_dims_rope {axes} must add up to attention_head_dim {width}")
        if any(each % 2 for each in axes):
            raise ValueError(f"axes_dims_rope must be even numbers, got {axes}")
        if made.eps != EPS:
            raise ValueError(f"the transformer's eps must be {EPS}, got {made.eps}")
        return made

    @property
    def axes(self) -> tuple[int, ...]:
        return self.axes_dims_rope

    @property
    def latent_channels(self) -> int:
        return self.in_channels

    @property
    def text_features(self) -> int:
        return self.joint_attention_dim

    @property
    def hidden(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


def joined(h: Streams) -> mx.array:
    """h_BSD, the rows of one stream after those of another."""
    return h if isinstance(h, mx.array) else mx.concatenate(list(h), axis=1)


class PictureTransformer:
    """A `family.Transformer`; a subclass adds `enter` and `leave`."""

    kinds: ClassVar[Mapping[str, BlockFunction]]  # by `Block.kind`
    latent: ClassVar[str]  # the Linear that reads the latents; its dtype is the model's

    def __init__(self, config: Any, weights: Mapping[str, Any]) -> None:
        """`weights`: arrays or packed ones; outside the blocks these have `dense()`, and `latent` must be an array."""
        self.config = config
        self.blocks = [Block(kind, name, {}) for kind, name in config.blocks()]
        self.top: dict[str, Any] = {}  # outside the blocks
        by_name = {block.name: block for block in self.blocks}
        for name in config.shapes():
            match = re.match(r"(.+?\.\d+)\.(.+)", name)
            if match and (block := by_name.get(match[1])):
                block.weights[match[2]] = weights[name]
            else:
                self.top[name] = weights[name]
        self.rope: Callable[[np.ndarray], list[mx.array]] = RotaryTables(config.axes, config.rope_theta)

    @property
    def dtype(self) -> mx.Dtype:
        found: mx.Dtype = self.top[f"{self.latent}.weight"].dtype
        return found

    def linears(self) -> dict[str, tuple[int, int]]:
        shapes = {name.removesuffix(".weight"): shape for name, shape in self.config.shapes().items() if name not in self.top}
        return {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}

    @classmethod
    def block(cls, kind: str) -> BlockFunction:
        return cls.kinds[kind]

    def enter(self, *given: Any, **inputs: Any) -> tuple[Streams, Shared]:
        raise NotImplementedError

    def leave(self, h_BSD: mx.array, shared: Shared) -> mx.array:
        raise NotImplementedError

    def __call__(self, *given: Any, linear_for: Callable[[str], Linear] | None = None, **inputs: Any) -> mx.array:
        """Velocity (B, L, C). Inputs as in `enter`; `linear_for(block name)` gives an adapter's `linear`."""
        h, shared = self.enter(*given, **inputs)
        for block in self.blocks:
            linear = linear_for(block.name) if linear_for else plain_linear
            h = self.block(block.kind)(block.weights, h, shared, linear)
        return self.leave(joined(h), shared)

    def _linear(self, name: str, x: mx.array) -> mx.array:
        """Outside the blocks."""
        y: mx.array = kernels.linear(x, self.top[f"{name}.weight"])
        bias = self.top.get(f"{name}.bias")
        return y if bias is None else y + bias
