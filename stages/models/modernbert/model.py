"""ModernBERT's encoder and its projections as a chain of blocks: token ids to unit vectors, one per token.

As in `stages.models.t5.model`, whose letters are used here too, several parts pass through the chain at once. P head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.attention import plain_linear
from stages.models.family import Block, Linear
from stages.models.folders import checked_sizes
from stages.models.t5.model import EPS, HIDDEN

Shape = tuple[int, ...]
Shared = list[dict[str, mx.array]]  # per part: masks that are added to the scores, and real_BL

EMBEDDING, EMBEDDING_NORM, FINAL_NORM = "embeddings.tok_embeddings.weight", "embeddings.norm.weight", "final_norm.weight"
FULL, SLIDING = "full_attention", "sliding_attention"
FIXED = {"hidden_activation": "gelu", "attention_bias": False, "mlp_bias": False, "norm_bias": False}


@dataclass(frozen=True)
class ModernBertConfig:
    """Fields have the names of config.json, but for those with a default."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    local_attention: int  # tokens that a token of a sliding layer reads, on both sides together
    norm_eps: float
    every: int = 3  # each so many layers, from the first, read all tokens
    full_theta: float = 160_000.0  # bases of the rotary positions
    sliding_theta: float = 10_000.0
    projections: tuple[int, ...] = ()  # widths of the token vectors after each

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], projections: tuple[int, ...]) -> ModernBertConfig:
        """Raises ValueError if a size is missing, or the model has parts that are not computed here."""
        if config.get("model_type") != "modernbert":
            raise ValueError(f"model_type of the encoder must be modernbert, got {config.get('model_type')!r}")
        for name, wanted in FIXED.items():
            if config.get(name, wanted) != wanted:
                raise ValueError(f"{name} of the encoder must be {wanted!r}, got {config[name]!r}")
        content = {"local_attention": 128, "norm_eps": 1e-5, **config, "projections": projections or (1,)}
        content |= {"every": _every(config), "full_theta": _theta(config, FULL), "sliding_theta": _theta(config, SLIDING)}
        found = cls(**checked_sizes(cls, content, "the encoder's config", "ModernBERT") | {"projections": projections})
        if found.hidden_size % (2 * found.num_attention_heads):
            raise ValueError(
                f"hidden_size of the encoder must be a multiple of twice {found.num_attention_heads} heads, "
                f"got {found.hidden_size}"
            )
        return found

    @property
    def num_heads(self) -> int:
        return self.num_attention_heads

    @property
    def dimensions(self) -> int:
        return self.projections[-1] if self.projections else self.hidden_size

    def kind(self, layer: int) -> str:
        return SLIDING if layer % self.every else FULL

    def layer_shapes(self, layer: int) -> dict[str, Shape]:
        D, F = self.hidden_size, self.intermediate_size
        shapes: dict[str, Shape] = {"attn.Wqkv": (3 * D, D), "attn.Wo": (D, D), "mlp_norm": (D,)}
        shapes |= {"mlp.Wi": (2 * F, D), "mlp.Wo": (D, F)} | ({"attn_norm": (D,)} if layer else {})
        return {f"{name}.weight": shape for name, shape in shapes.items()}

    def encoder_shapes(self) -> dict[str, Shape]:
        layers = {f"layers.{n}.{k}": s for n in range(self.num_hidden_layers) for k, s in self.layer_shapes(n).items()}
        D = (self.hidden_size,)
        return {EMBEDDING: (self.vocab_size, *D), EMBEDDING_NORM: D, **layers, FINAL_NORM: D}

    def projection_shapes(self) -> dict[str, Shape]:
        widths = pairwise((self.hidden_size, *self.projections))
        return {f"head.{n}.weight": (outputs, inputs) for n, (inputs, outputs) in enumerate(widths)}

    def shapes(self) -> dict[str, Shape]:
        return {**self.encoder_shapes(), **self.projection_shapes()}


def _every(config: Mapping[str, Any]) -> int:
    kinds = config.get("layer_types")
    if kinds is None:
        found: int = config.get("global_attn_every_n_layers", 3)
        return found
    again = [n for n, kind in enumerate(kinds) if kind == FULL][1:2] if isinstance(kinds, list) else []
    every = again[0] if again else len(kinds)
    if kinds != [SLIDING if n % every else FULL for n in range(config.get("num_hidden_layers", -1))]:
        raise ValueError("layer_types of the encoder must be full_attention in regular distances, from the first layer on")
    return every


def _theta(config: Mapping[str, Any], kind: str) -> Any:
    old, default = ("global_rope_theta", 160_000.0) if kind == FULL else ("local_rope_theta", 10_000.0)
    rope = (config.get("rope_parameters") or {}).get(kind) or {}
    if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise ValueError(f"rope_parameters of the encoder must be of the type default, got {rope.get('rope_type')!r}")
    return rope.get("rope_theta", config.get(old, default))


class ModernBert:
    """As `stages.models.t5.model.T5`: `model(ids, real)` -> float32 (B, L, E) per part. Vectors of padding mean nothing."""

    def __init__(self, config: ModernBertConfig, weights: Mapping[str, Any]) -> None:
        self.config = config
        self.embedding, self.norm = weights[EMBEDDING], weights[EMBEDDING_NORM]
        self.blocks = [
            # Compiled functions are kept by kind, and the first layer lacks a weight.
            Block(
                f"{config.kind(n)}{'' if n else ' first'}",
                f"layers.{n}",
                {name: weights[f"layers.{n}.{name}"] for name in config.layer_shapes(n)},
            )
            for n in range(config.num_hidden_layers)
        ]
        head = {name.removeprefix("head."): weights[name] for name in config.projection_shapes()}
        self.blocks.append(Block("head", "head", {"final_norm.weight": weights[FINAL_NORM], **head}))

    @property
    def dtype(self) -> mx.Dtype:
        found: mx.Dtype = self.embedding.dtype
        return found

    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) by full name."""
        shapes = {name: shape for name, shape in self.config.shapes().items() if name != EMBEDDING}
        return {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}

    def enter(self, ids: Sequence[mx.array], real: Sequence[mx.array]) -> tuple[mx.array, Shared]:
        h_TD = mx.concatenate([self.embedding[part_BL.reshape(-1)] for part_BL in ids])
        shared = []
        for real_BL in real:
            places = np.arange(real_BL.shape[1])
            near_LL = np.abs(places[:, None] - places) <= self.config.local_attention // 2
            # Added, as a token far from all real ones has nothing to read: of no scores, softmax would make NaN.
            full_B1LL = mx.where(real_BL, 0.0, HIDDEN)[:, None, None, :]
            sliding_B1LL = mx.where(mx.array(near_LL), full_B1LL, HIDDEN)
            masks = {FULL: full_B1LL.astype(self.dtype), SLIDING: sliding_B1LL.astype(self.dtype)}
            # In PyTorch the answer of such a token's attention is 0.
            reads_B1L1 = (sliding_B1LL == 0).any(-1, keepdims=True).astype(self.dtype)
            shared.append({**masks, "reads_B1L1": reads_B1L1, "real_BL": real_BL})
        return mx.fast.layer_norm(h_TD, self.norm, None, self.config.norm_eps), shared

    def block(self, kind: str) -> Callable[..., mx.array]:
        """function(weights, h_TD, shared, linear=plain_linear) of a kind of blocks."""
        c = self.config

        def normed(x_TD: mx.array, weight_D: mx.array) -> mx.array:
            return mx.fast.layer_norm(x_TD, weight_D, None, c.norm_eps)

        def head(weights: Mapping[str, Any], h_TD: mx.array, shared: Shared, linear: Linear = plain_linear) -> mx.array:
            h_TD = normed(h_TD, weights["final_norm.weight"])
            for n in range(len(c.projections)):
                h_TD = linear(str(n), weights[f"{n}.weight"], h_TD)
            return h_TD

        def layer(weights: Mapping[str, Any], h_TD: mx.array, shared: Shared, linear: Linear = plain_linear) -> mx.array:
            x_TD = normed(h_TD, weights["attn_norm.weight"]) if "attn_norm.weight" in weights else h_TD
            h_TD = h_TD + self._attention(kind.removesuffix(" first"), weights, x_TD, shared, linear)
            x_TD = normed(h_TD, weights["mlp_norm.weight"])
            inner, gate = mx.split(linear("mlp.Wi", weights["mlp.Wi.weight"], x_TD), 2, axis=-1)
            return h_TD + linear("mlp.Wo", weights["mlp.Wo.weight"], gelu(inner) * gate)

        return head if kind == "head" else layer

    def _attention(self, kind: str, weights: Mapping[str, Any], x_TD: mx.array, shared: Shared, linear: Linear) -> mx.array:
        c, done, start = self.config, [], 0
        theta = c.full_theta if kind == FULL else c.sliding_theta
        qkv_TD = linear("attn.Wqkv", weights["attn.Wqkv.weight"], x_TD)
        width = c.hidden_size // c.num_attention_heads
        for part in shared:
            B, L = part["real_BL"].shape
            parts = qkv_TD[start : start + B * L].reshape(B, L, 3, c.num_attention_heads, width).transpose(2, 0, 3, 1, 4)
            start += B * L
            q_BHLP, k_BHLP = (mx.fast.rope(parts[n], width, traditional=False, base=theta, scale=1.0, offset=0) for n in range(2))
            y_BHLP = mx.fast.scaled_dot_product_attention(q_BHLP, k_BHLP, parts[2], scale=width**-0.5, mask=part[kind])
            y_BHLP = y_BHLP if kind == FULL else y_BHLP * part["reads_B1L1"]
            done.append(y_BHLP.swapaxes(1, 2).reshape(B * L, -1))
        return linear("attn.Wo", weights["attn.Wo.weight"], mx.concatenate(done))

    def leave(self, h_TE: mx.array, shared: Shared) -> list[mx.array]:
        wide_TE = h_TE.astype(mx.float32)
        unit_TE = wide_TE / mx.maximum(mx.sqrt((wide_TE * wide_TE).sum(-1, keepdims=True)), EPS)
        ends = np.cumsum([part["real_BL"].size for part in shared]).tolist()
        parts = mx.split(unit_TE, ends[:-1]) if len(ends) > 1 else [unit_TE]
        return [x_LE.reshape(*part["real_BL"].shape, -1) for x_LE, part in zip(parts, shared, strict=True)]

    def __call__(self, ids: Sequence[mx.array], real: Sequence[mx.array]) -> list[mx.array]:
        h_TD, shared = self.enter(ids, real)
        for block in self.blocks:
            h_TD = self.block(block.kind)(block.weights, h_TD, shared)
        return self.leave(h_TD, shared)


def gelu(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.erf(x / 2**0.5))
