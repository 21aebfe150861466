"""The blocks of the FLUX.2 transformer with LoRA in PyTorch, on CUDA, with random weights.

Written for speed as a PyTorch user would write them: fused attention, bfloat16 weights, float32 LoRA masters that are cast
to the dtype of the activations. Import this module only where PyTorch is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stages.models.family import Family

DEVICE = "cuda"
TEXT_TOKENS = 512


@dataclass(frozen=True)
class Sizes:
    heads: int
    head_width: int
    mlp_width: int
    double_blocks: int
    single_blocks: int
    rank: int

    @property
    def width(self) -> int:
        return self.heads * self.head_width

    @classmethod
    def of(cls, family: Family, rank: int) -> Sizes:
        """The sizes of a family's transformer, with LoRAs of `rank`."""
        record = family.transformer
        heads, width = record["num_attention_heads"], record["attention_head_dim"]
        mlp = int(heads * width * record["mlp_ratio"])
        return cls(heads, width, mlp, record["num_layers"], record["num_single_layers"], rank)


class LoraLinear(nn.Module):
    """x W^T + (x A^T) B^T with W frozen in bfloat16, and A and B in float32, cast to x's dtype."""

    def __init__(self, inputs: int, outputs: int, rank: int, weight: Any = None) -> None:
        super().__init__()
        if weight is None:
            weight = torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16) * inputs**-0.5
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, inputs, device=DEVICE) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank, device=DEVICE))

    def forward(self, x: Any) -> Any:
        low = nn.functional.linear(x, self.down.to(x.dtype))
        return nn.functional.linear(x, self.weight) + nn.functional.linear(low, self.up.to(x.dtype))


def modulated_norm(x: Any, modulation: Any) -> Any:
    """LayerNorm without weights, then scaled by 1 + modulation[1] and shifted by modulation[0]."""
    return nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + modulation[1]) + modulation[0]


def attention(q: Any, k: Any, v: Any, rope: Any) -> Any:
    """Attention with rotary position encoding. q, k, v: (batch, tokens, heads, width); rope: (cosines, sines)."""
    q, k = (rotate(x, rope).transpose(1, 2) for x in (q, k))
    return nn.functional.scaled_dot_product_attention(q, k, v.transpose(1, 2)).transpose(1, 2).flatten(2)


def rotate(x: Any, rope: Any) -> Any:
    """Turn neighbouring pairs of the last axis by the angles of `rope`, in float32."""
    pairs = x.float().unflatten(-1, (-1, 2))
    x0, x1 = pairs[..., 0], pairs[..., 1]
    cos, sin = rope
    return torch.stack([x0 * cos - x1 * sin, x0 * sin + x1 * cos], -1).flatten(-2).to(x.dtype)


def swiglu(x: Any) -> Any:
    """SiLU of the first half of the last axis, times the second half."""
    gate, up = x.chunk(2, -1)
    return nn.functional.silu(gate) * up


def head_norms(sizes: Sizes) -> nn.ModuleList:
    norms = [nn.RMSNorm(sizes.head_width, 1e-6, device=DEVICE, dtype=torch.bfloat16) for _ in "qk"]
    return nn.ModuleList(norms).requires_grad_(False)


class SingleBlock(nn.Module):
    """A single-stream block: attention and MLP side by side, on text and image tokens together."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = (sizes.heads, sizes.head_width)
        self.split = [sizes.width] * 3 + [2 * sizes.mlp_width]
        self.into = LoraLinear(sizes.width, sum(self.split), sizes.rank)
        self.out = LoraLinear(sizes.width + sizes.mlp_width, sizes.width, sizes.rank)
        self.norms = head_norms(sizes)

    def forward(self, h: Any, modulation: Any, rope: Any) -> Any:
        *qkv, mlp = self.into(modulated_norm(h, modulation)).split(self.split, -1)
        q, k, v = (x.unflatten(-1, self.heads) for x in qkv)
        y = attention(self.norms[0](q), self.norms[1](k), v, rope)
        return h + modulation[2] * self.out(torch.cat([y, swiglu(mlp)], -1))


class Stream(nn.Module):
    """The text half or the image half of a double-stream block."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, mlp, rank = sizes.width, sizes.mlp_width, sizes.rank
        self.heads = (sizes.heads, sizes.head_width)
        self.qkv = nn.ModuleList(LoraLinear(width, width, rank) for _ in range(3))
        self.out, self.into, self.down = (
            LoraLinear(width, width, rank),
            LoraLinear(width, 2 * mlp, rank),
            LoraLinear(mlp, width, rank),
        )
        self.norms = head_norms(sizes)

    def project(self, h: Any, modulation: Any) -> list[Any]:
        x = modulated_norm(h, modulation)
        q, k, v = (linear(x).unflatten(-1, self.heads) for linear in self.qkv)
        return [self.norms[0](q), self.norms[1](k), v]

    def finish(self, h: Any, y: Any, modulation: Any) -> Any:
        h = h + modulation[2] * self.out(y)
        return h + modulation[5] * self.down(swiglu(self.into(modulated_norm(h, modulation[3:]))))


class DoubleBlock(nn.Module):
    """A double-stream block: text and image have weights of their own and attend to each other."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.text, self.image = Stream(sizes), Stream(sizes)

    def forward(self, h: Any, modulation: Any, rope: Any) -> Any:
        text, image = h[:, :TEXT_TOKENS], h[:, TEXT_TOKENS:]
        pairs = zip(self.text.project(text, modulation), self.image.project(image, modulation), strict=True)
        q, k, v = (torch.cat(pair, 1) for pair in pairs)
        y = attention(q, k, v, rope)
        text = self.text.finish(text, y[:, :TEXT_TOKENS], modulation)
        image = self.image.finish(image, y[:, TEXT_TOKENS:], modulation)
        return torch.cat([text, image], 1)


def make_blocks(sizes: Sizes) -> list[Any]:
    return [
        *(DoubleBlock(sizes) for _ in range(sizes.double_blocks)),
        *(SingleBlock(sizes) for _ in range(sizes.single_blocks)),
    ]
