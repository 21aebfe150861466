"""T5's encoder and its projection head as a chain of blocks: token ids to unit vectors, one per token.

Several parts (queries and documents, say), each an array of token ids with its own length, pass through the chain at once.
Their tokens lie one after another, so that every Linear is one matrix product. Only attention knows the parts.
T tokens of all parts, B texts of a part, L tokens of a text, D model width, H heads, K head width, E width of a token vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from stages import kernels
from stages.models.t5.config import BIAS, EMBEDDING, FINAL_NORM, HEAD, T5Config, block_name
from stages.models.t5.layers import HIDDEN, attend, buckets, gelu_times, rms_norm

Linear = Callable[[str, Any, mx.array], mx.array]  # (name within the block, weight, x) -> y
Shared = list[dict[str, mx.array]]  # per part: mask_BHLL, added to the scores of every block, and real_BL

TABLES_KEPT = 16  # tables of buckets in memory, one per length
EPS = 1e-12  # the least norm that a vector is divided by, as in PyTorch's normalize


@dataclass(frozen=True)
class Block:
    kind: str  # gated or relu, by its feed-forward; head: the projection
    name: str  # encoder.block.0
    weights: dict[str, Any]  # by name within the block: layer.0.layer_norm.weight


class T5:
    """`model(ids, real)` -> float32 (B, L, E) per part, from int32 `ids` and boolean `real` (False: padding), each (B, L)."""

    def __init__(self, config: T5Config, weights: Mapping[str, Any]) -> None:
        """`weights` by the names of `config.shapes()`. A Linear's may be packed, if the caller's `linear` computes with it."""
        self.config = config
        self.embedding, self.bias = weights[EMBEDDING], weights[BIAS]
        kind = "gated" if config.gated else "relu"
        self.blocks = [
            Block(kind, name, {inside: weights[f"{name}.{inside}"] for inside in config.block_shapes()})
            for name in map(block_name, range(config.num_layers))
        ]
        head = {"final_layer_norm.weight": weights[FINAL_NORM], "linear.weight": weights[HEAD]}
        self.blocks.append(Block("head", "head", head))
        self._buckets: dict[int, mx.array] = {}

    @property
    def dtype(self) -> mx.Dtype:
        found: mx.Dtype = self.embedding.dtype
        return found

    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) by full name; the last is head.linear."""
        shapes = {name: shape for name, shape in self.config.shapes().items() if name not in (EMBEDDING, BIAS)}
        return {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}

    def enter(self, ids: Sequence[mx.array], real: Sequence[mx.array]) -> tuple[mx.array, Shared]:
        """(h_TD, masks of each part). Arguments as in `T5`."""
        h_TD = mx.concatenate([self.embedding[part_BL.reshape(-1)] for part_BL in ids])
        return h_TD, [self._part(part_BL) for part_BL in real]

    def _part(self, real_BL: mx.array) -> dict[str, mx.array]:
        length = real_BL.shape[1]
        bias_1HLL = self.bias[self._bucket_table(length)].transpose(2, 0, 1)[None]
        hidden_B11L = mx.where(real_BL, 0.0, HIDDEN)[:, None, None, :]
        mask_BHLL = mx.contiguous(bias_1HLL).astype(self.dtype) + hidden_B11L.astype(self.dtype)
        return {"mask_BHLL": mask_BHLL, "real_BL": real_BL}

    def _bucket_table(self, length: int) -> mx.array:
        if length not in self._buckets:
            c = self.config
            found = buckets(length, c.relative_attention_num_buckets, c.relative_attention_max_distance)
            self._buckets[length] = mx.array(found)
            if len(self._buckets) > TABLES_KEPT:
                self._buckets.pop(next(iter(self._buckets)))
        return self._buckets[length]

    def block(self, kind: str) -> Callable[..., mx.array]:
        """function(weights, h_TD, shared, linear=plain_linear) of a kind of blocks. The head's vectors are not normalised yet."""
        eps, heads = self.config.layer_norm_epsilon, self.config.num_heads
        if kind == "head":
            return lambda weights, h_TD, shared, linear=plain_linear: linear(
                "linear", weights["linear.weight"], rms_norm(h_TD, weights["final_layer_norm.weight"], eps)
            )
        forward = _gated if kind == "gated" else _relu

        def layer(weights: Mapping[str, Any], h_TD: mx.array, shared: Shared, linear: Linear = plain_linear) -> mx.array:
            x_TD = rms_norm(h_TD, weights["layer.0.layer_norm.weight"], eps)
            h_TD = h_TD + _attention(weights, x_TD, shared, linear, heads)
            return h_TD + forward(weights, rms_norm(h_TD, weights["layer.1.layer_norm.weight"], eps), linear)

        return layer

    def leave(self, h_TE: mx.array, shared: Shared) -> list[mx.array]:
        """Token vectors (B, L, E) per part: of length 1, or zero for padding."""
        wide_TE = h_TE.astype(mx.float32)
        # The inner maximum keeps the gradient of the root finite at 0.
        unit_TE = wide_TE / mx.maximum(mx.sqrt(mx.maximum((wide_TE * wide_TE).sum(-1, keepdims=True), EPS**2)), EPS)
        parts = _split(unit_TE, shared)
        return [
            x_LE.reshape(*part["real_BL"].shape, -1) * part["real_BL"][:, :, None]
            for x_LE, part in zip(parts, shared, strict=True)
        ]

    def __call__(
        self, ids: Sequence[mx.array], real: Sequence[mx.array], linear_for: Callable[[str], Linear] | None = None
    ) -> list[mx.array]:
        """See `T5`. `linear_for(block name)` gives the `linear` of a block, to apply an adapter."""
        h_TD, shared = self.enter(ids, real)
        for block in self.blocks:
            linear = linear_for(block.name) if linear_for else plain_linear
            h_TD = self.block(block.kind)(block.weights, h_TD, shared, linear)
        return self.leave(h_TD, shared)


def plain_linear(name: str, weight: Any, x: mx.array) -> mx.array:
    return kernels.linear(x, weight)


def _split(x_TD: mx.array, shared: Shared) -> list[mx.array]:
    ends: list[int] = np.cumsum([part["real_BL"].size for part in shared]).tolist()
    return list(mx.split(x_TD, ends[:-1])) if len(ends) > 1 else [x_TD]


def _attention(weights: Mapping[str, Any], x_TD: mx.array, shared: Shared, linear: Linear, heads: int) -> mx.array:
    def project(name: str) -> list[mx.array]:
        full = f"layer.0.SelfAttention.{name}"
        return _split(linear(full, weights[f"{full}.weight"], x_TD), shared)

    done: list[mx.array] = []
    for q, k, v, part in zip(project("q"), project("k"), project("v"), shared, strict=True):
        B, L = part["real_BL"].shape
        q_BHLK, k_BHLK, v_BHLK = (x.reshape(B, L, heads, -1).swapaxes(1, 2) for x in (q, k, v))
        y_BHLK = attend(q_BHLK, k_BHLK, v_BHLK, part["mask_BHLL"])
        done.append(y_BHLK.swapaxes(1, 2).reshape(B * L, -1))
    y_TD = mx.concatenate(done) if len(done) > 1 else done[0]
    return linear("layer.0.SelfAttention.o", weights["layer.0.SelfAttention.o.weight"], y_TD)


def _gated(weights: Mapping[str, Any], x_TD: mx.array, linear: Linear) -> mx.array:
    gate, up = (linear(name, weights[f"{name}.weight"], x_TD) for name in map(_inner, ("wi_0", "wi_1")))
    return linear(_inner("wo"), weights[f"{_inner('wo')}.weight"], gelu_times(gate, up))


def _relu(weights: Mapping[str, Any], x_TD: mx.array, linear: Linear) -> mx.array:
    inner_TF = mx.maximum(linear(_inner("wi"), weights[f"{_inner('wi')}.weight"], x_TD), 0)
    return linear(_inner("wo"), weights[f"{_inner('wo')}.weight"], inner_TF)


def _inner(name: str) -> str:
    return f"layer.1.DenseReluDense.{name}"
