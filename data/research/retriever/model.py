"""The encoder in PyTorch: T5 v1.1's architecture under the names that transformers gives its weights, and the projection head.

Written out so that it compiles into few kernels; `tests/data/retriever` compares it with `transformers.T5EncoderModel`.
In names: B texts, L tokens, H heads, K values of a head, D width, E values of an output vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

FAR = -1e4  # added to the attention on padding; bfloat16 and float16 can hold it


@dataclass(frozen=True)
class Sizes:
    """The sizes of an encoder."""

    pieces: int = 8192
    width: int = 256
    layers: int = 6
    heads: int = 8
    head: int = 32
    inner: int = 704
    output: int = 128
    buckets: int = 32
    distance: int = 128
    dropout: float = 0.05

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {
            "architectures": ["T5EncoderModel"],
            "model_type": "t5",
            "vocab_size": self.pieces,
            "d_model": self.width,
            "d_kv": self.head,
            "d_ff": self.inner,
            "num_layers": self.layers,
            "num_heads": self.heads,
            "feed_forward_proj": "gated-gelu",
            "dense_act_fn": "gelu_new",
            "is_gated_act": True,
            "is_encoder_decoder": False,
            "use_cache": False,
            "relative_attention_num_buckets": self.buckets,
            "relative_attention_max_distance": self.distance,
            "layer_norm_epsilon": 1e-6,
            "dropout_rate": self.dropout,
            "initializer_factor": 1.0,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "tie_word_embeddings": True,
        }


MICRO = Sizes()


def buckets(length: int, sizes: Sizes) -> Tensor:
    """Return T5's bucket of relative position for every pair of tokens, [L, L]. Keys before and after the query have
    different buckets. They are computed in float64.
    """
    offset = np.arange(length)[None, :] - np.arange(length)[:, None]
    half = sizes.buckets // 2
    exact = half // 2
    far = np.abs(offset)
    ratio = np.log(np.maximum(far, 1) / exact) / np.log(sizes.distance / exact)
    large = np.minimum(exact + (ratio * (half - exact)).astype(np.int64), half - 1)
    return torch.from_numpy(np.where(offset > 0, half, 0) + np.where(far < exact, far, large))


class Norm(nn.Module):
    """T5's layer norm: values are divided by their root mean square. There is no bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis, in float32."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6))


def _linear(inputs: int, outputs: int, deviation: float) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=deviation)
    return made


class Attention(nn.Module):
    """T5's self-attention. The scores are not scaled, and the Linears have no bias. Only the first layer has the table of
    relative positions.
    """

    def __init__(self, sizes: Sizes, first: bool) -> None:
        super().__init__()
        width, inner = sizes.width, sizes.heads * sizes.head
        self.heads, self.head = sizes.heads, sizes.head
        self.q = _linear(width, inner, (width * sizes.head) ** -0.5)
        self.k = _linear(width, inner, width**-0.5)
        self.v = _linear(width, inner, width**-0.5)
        self.o = _linear(inner, width, inner**-0.5)
        if first:
            self.relative_attention_bias = nn.Embedding(sizes.buckets, sizes.heads)
            nn.init.normal_(self.relative_attention_bias.weight, std=width**-0.5)

    def forward(self, x_BLD: Tensor, bias: Tensor) -> Tensor:
        """Return the attention of `x_BLD`, in the same shape. `bias` [B, H, L, L] is added to the scores; it holds relative
        positions, and hides padding.
        """
        B, L, _ = x_BLD.shape
        q, k, v = (part(x_BLD).view(B, L, self.heads, self.head).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = torch.softmax((q @ k.transpose(2, 3)).float() + bias, -1).to(v.dtype)
        out: Tensor = self.o((weights @ v).transpose(1, 2).reshape(B, L, -1))
        return out


class FeedForward(nn.Module):
    """The gated feed-forward layer with the tanh form of GELU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.wi_0 = _linear(sizes.width, sizes.inner, sizes.width**-0.5)
        self.wi_1 = _linear(sizes.width, sizes.inner, sizes.width**-0.5)
        self.wo = _linear(sizes.inner, sizes.width, sizes.inner**-0.5)
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the feed-forward layer, in the shape of `x`."""
        out: Tensor = self.wo(self.drop(functional.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x)))
        return out


class Layer(nn.Module):
    """A part of a block, attention or feed-forward, with the norm before it. Weights have the names of transformers."""

    def __init__(self, sizes: Sizes, name: str, part: nn.Module) -> None:
        super().__init__()
        self.add_module(name, part)
        self.part = name
        self.layer_norm = Norm(sizes.width)
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """Normalise `x`, apply the part, and add its output to `x`. `more` are further arguments of the part."""
        added: Tensor = x + self.drop(getattr(self, self.part)(self.layer_norm(x), *more))
        return added


class Block(nn.Module):
    """One block of the encoder: attention, then feed-forward."""

    def __init__(self, sizes: Sizes, first: bool) -> None:
        super().__init__()
        attention = Layer(sizes, "SelfAttention", Attention(sizes, first))
        self.layer = nn.ModuleList([attention, Layer(sizes, "DenseReluDense", FeedForward(sizes))])

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the output of the block, in the shape of `x`. `bias` is that of `Attention`."""
        out: Tensor = self.layer[1](self.layer[0](x, bias))
        return out


class Stack(nn.Module):
    """All blocks of the encoder, and the norm after them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.block = nn.ModuleList([Block(sizes, n == 0) for n in range(sizes.layers)])
        self.final_layer_norm = Norm(sizes.width)


class Encoder(nn.Module):
    """The text encoder. It turns token ids into one vector of length 1 per token."""

    def __init__(self, sizes: Sizes = MICRO) -> None:
        super().__init__()
        self.sizes = sizes
        self.shared = nn.Embedding(sizes.pieces, sizes.width)
        self.encoder = Stack(sizes)
        self.linear = _linear(sizes.width, sizes.output, sizes.width**-0.5)
        self.drop = nn.Dropout(sizes.dropout)

    def hidden(self, ids_BL: Tensor, seen_BL: Tensor, buckets_LL: Tensor) -> Tensor:
        """Return the hidden states after the last norm, [B, L, D]. `ids_BL` are token ids, `seen_BL` is False for padding,
        and `buckets_LL` is the result of `buckets`.
        """
        table = self.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
        position = table(buckets_LL).permute(2, 0, 1)[None].float()
        bias = position + torch.where(seen_BL, 0.0, FAR)[:, None, None, :]
        x = self.drop(self.shared(ids_BL))
        for block in self.encoder.block:
            x = block(x, bias)
        found: Tensor = self.encoder.final_layer_norm(x)
        return found

    def forward(self, ids_BL: Tensor, seen_BL: Tensor, buckets_LL: Tensor) -> Tensor:
        """Return the token vectors [B, L, E] in float32, each of length 1. `ids_BL` are token ids, `seen_BL` is False for
        padding, and `buckets_LL` is the result of `buckets`.
        """
        states = self.hidden(ids_BL, seen_BL, buckets_LL)
        return functional.normalize(self.linear(self.drop(states)).float(), dim=-1)
