"""T5's encoder and its projection head as a chain of blocks: token ids to unit vectors, one per token.

Several arrays of token ids pass through the chain at once, each with its own length: queries and documents, for example. Their
tokens lie one after another in the residual stream, so that every Linear is one matrix product. Only attention knows the parts.
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
    """One block of the encoder, or the projection head (the last linear layer). `kind` says how it is computed. "gated"
    is an encoder block with a gated feed-forward layer. "relu" is an encoder block whose feed-forward layer uses ReLU.
    "head" is the projection head. `name` is the full name, such as "encoder.block.0". `weights` maps names within the
    block, such as "layer.0.layer_norm.weight", to arrays.
    """

    kind: str
    name: str
    weights: dict[str, Any]


class T5:
    """The T5 encoder with a projection head (the last linear layer). Call `model(ids, real)` to get a vector for each
    token. `ids` is a list of parts. A part is an int32 array of token ids, (texts, tokens). Parts may have different
    shapes. `real` is a list with one boolean array per part, in the shape of the part. It is False for padding. The
    result is a list with one float32 array (texts, tokens, width) per part.

    To compute the blocks one at a time, call `enter`. Then call the function `block(kind)` for each of `blocks`. Then
    call `leave`. The last block is the head.
    """

    def __init__(self, config: T5Config, weights: Mapping[str, Any]) -> None:
        """Build the encoder. `config` holds its sizes. `weights` maps every name in `config.shapes()` to an array. The
        matrix of a Linear may also be another object, such as a packed (quantised) weight. The encoder alone cannot
        compute with a packed weight: the caller must supply a function for this.

        The function is called as `linear(name, weight, x)` and computes one Linear. `weight` is the object from
        `weights`. There are two ways to supply the function. `model(ids, real, linear_for)` calls `linear_for(block
        name)` to get the function for a block. If the blocks are computed one at a time, `linear` is the last argument
        of the function that `block(kind)` returns.
        """
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
        """The dtype in which the encoder computes."""
        found: mx.Dtype = self.embedding.dtype
        return found

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the sizes of the Linears of all blocks and of the head. The result maps the full name of each Linear
        to `(outputs, inputs)`. The last entry is the head's Linear, "head.linear".
        """
        shapes = {name: shape for name, shape in self.config.shapes().items() if name not in (EMBEDDING, BIAS)}
        return {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}

    def enter(self, ids: Sequence[mx.array], real: Sequence[mx.array]) -> tuple[mx.array, Shared]:
        """Start a forward pass, and return `(h_TD, shared)`. `h_TD` is the input of the first block, `(tokens of all
        parts, width)`. `shared` holds what all blocks read: for each part, an attention mask with position biases, and
        a padding mask. `ids` is a list of parts. A part is an int32 array of token ids, `(texts, tokens)`. Parts may
        have different shapes. `real` is a list with one boolean array per part, in the shape of the part. It is False
        for padding.
        """
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
        """Return the function that computes a block of one `kind`: "gated", "relu" or "head". For a `Block` `b` of this
        kind, call the function as `function(b.weights, h_TD, shared)`. `h_TD` is the input of the block, an array
        `(tokens, width)`: the output of the block before, or the first result of `enter` for the first block. `shared`
        is the second result of `enter`: the masks that all blocks read. The function returns the output of the block.

        For "gated" and "relu", the output has the shape of `h_TD`. For "head", the output is the token vectors,
        `(tokens, width of a vector)`. `h_TD` holds the tokens of all arrays that were passed to `enter`. The token
        vectors are not normalised yet; `leave` does this. The function has a fourth, optional argument `linear`.
        `linear(name, weight, x)` computes one Linear, for example with an adapter. Without this argument, a Linear is
        `x @ weight.T`.
        """
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
        """End a forward pass, and return the token vectors as a list with one float32 array per part. A part is one of
        the arrays of token ids, `(texts, tokens)`, that were passed to `enter`. `h_TE` is the output of the last block,
        "head": one array `(tokens of all parts, width)`, with one part after another. `shared` is the second result of
        `enter`. For example, if two parts have the shapes `(2, 5)` and `(1, 3)`, `h_TE` has 10 + 3 rows. The result is
        then two arrays, `(2, 5, width)` and `(1, 3, width)`.

        Vectors of real tokens have length 1. Vectors of padding are zero.
        """
        wide_TE = h_TE.astype(mx.float32)
        unit_TE = wide_TE / mx.maximum(mx.sqrt(mx.maximum((wide_TE * wide_TE).sum(-1, keepdims=True), EPS**2)), EPS)
        parts = _split(unit_TE, shared)
        return [
            x_LE.reshape(*part["real_BL"].shape, -1) * part["real_BL"][:, :, None]
            for x_LE, part in zip(parts, shared, strict=True)
        ]

    def __call__(
        self, ids: Sequence[mx.array], real: Sequence[mx.array], linear_for: Callable[[str], Linear] | None = None
    ) -> list[mx.array]:
        """Return one vector for each token of several batches of texts, called parts. `ids` is a list with one int32
        array of token ids, `(texts, tokens)`, per part. `real` is a list with one boolean array `(texts, tokens)` per
        part. It is True for real tokens and False for padding. The result is a list with one float32 array `(texts,
        tokens, width)` per part. `linear_for(block name)` returns a function that computes the Linears of a block, to
        apply an adapter. None means no adapter.

        Vectors of real tokens have length 1. Vectors of padding are zero. The function that `linear_for` returns is
        called as `linear(name, weight, x)`. `name` is the Linear's name within the block.
        """
        h_TD, shared = self.enter(ids, real)
        for block in self.blocks:
            linear = linear_for(block.name) if linear_for else plain_linear
            h_TD = self.block(block.kind)(block.weights, h_TD, shared, linear)
        return self.leave(h_TD, shared)


def plain_linear(name: str, weight: Any, x: mx.array) -> mx.array:
    """Return x W^T. `weight` is W, an array (outputs, inputs). `name` is not used."""
    return kernels.linear(x, weight)


def _split(x_TD: mx.array, shared: Shared) -> list[mx.array]:
    """Split the rows of `x_TD` into one array per part, and return the arrays as a list. A part is one batch of texts;
    the encoder computes several parts together. `x_TD` has one row per token: all tokens of the first part, then all
    tokens of the second part, and so on. `shared` is a list with one dict per part. The entry "real_BL" of a dict is an
    array `(texts, tokens)`. For example, if the two arrays "real_BL" have the shapes `(2, 5)` and `(1, 3)`, the first
    10 rows are the first part, and the other 3 rows are the second.
    """
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
