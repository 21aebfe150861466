"""The operations within a FLUX.2 block: modulation, normalisation, rotary positions, gated feed-forward, attention.

Some have a gradient of their own, because MLX's keeps more in memory or takes more kernels.
B batch, S rows, D hidden width, F feed-forward width, H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.attention import attention
from stages.models.flux2.config import EPS


def silu(x: mx.array) -> mx.array:
    """Return x * sigmoid(x), element by element."""
    return x * mx.sigmoid(x)


def modulation(y_BN: mx.array, hidden: int, rows: int) -> list[mx.array]:
    """Split the output of a modulation Linear into shift, 1 + scale and gate, once or twice, for `rows` rows.
    y_BN: (batch, 3 or 6 times `hidden`). Each part is (batch, rows, hidden). 1 is added to the scale here, once for all blocks.
    """
    parts = mx.split(y_BN, y_BN.shape[-1] // hidden, axis=-1)
    return spread([1 + part if at % 3 == 1 else part for at, part in enumerate(parts)], rows)


def spread(parts: Sequence[mx.array], rows: int) -> list[mx.array]:
    """Repeat each (batch, hidden) array for every row: views of shape (batch, rows, hidden), which take no memory.
    This is done once for all blocks. Within a compiled block it would be one more kind of kernel, and each kind costs a GPU
    seconds to compile.
    """
    return [mx.broadcast_to(part_BD[:, None], (part_BD.shape[0], rows, part_BD.shape[1])) for part_BD in parts]


def modulate(x_BSD: mx.array, mods: list[mx.array]) -> mx.array:
    """Apply LayerNorm without weights, then multiply by mods[1] (1 + scale) and add mods[0] (shift).
    x_BSD and the modulations are (batch, rows, hidden). The blocks add their gated outputs in the same order of factors and
    terms, so that one compiled kernel serves both.
    """
    return mx.fast.layer_norm(x_BSD, None, None, EPS) * mods[1] + mods[0]


def swiglu(x_BSF: mx.array) -> mx.array:
    """Return silu(first half) * second half of the last axis: (batch, rows, 2 F) to (batch, rows, F)."""
    gate, up = mx.split(x_BSF, 2, axis=-1)
    return gated(gate, up)


def gated(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up. The gradient computes the sigmoid again, which is cheaper than keeping it in memory."""
    made: Any = _gated(gate, up)
    y: mx.array = made
    return y


@mx.custom_function
def _gated(gate: mx.array, up: mx.array) -> mx.array:
    return silu(gate) * up


@_gated.vjp  # type: ignore[untyped-decorator, unused-ignore]
def _gated_vjp(primals: Any, dy: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    # The dependencies on dy, and of one gradient on the other, keep the compiler from reusing the sigmoid of the forward
    # pass, which it would have to keep until here.
    gate, up = mx.depends(list(primals), [dy])
    share = mx.sigmoid(gate)
    dgate = dy * up * (share + gate * share * (1 - share))
    again = mx.depends([gate], [dgate])[0]
    return dgate, silu(again) * dy


def normed(x_BSHK: mx.array, weight_K: mx.array) -> mx.array:
    """Apply RMSNorm to every head: x_BSHK is (batch, rows, heads, head width), weight_K (head width).
    The weight is frozen. Its gradient is zero here, while MLX's own would be a sum over all rows.
    """
    made: Any = _normed(x_BSHK, weight_K)
    y_BSHK: mx.array = made
    return y_BSHK


@mx.custom_function
def _normed(x_BSHK: mx.array, weight_K: mx.array) -> mx.array:
    return mx.fast.rms_norm(x_BSHK, weight_K, EPS)


@_normed.vjp  # type: ignore[untyped-decorator, unused-ignore]
def _normed_vjp(primals: Any, dy_BSHK: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    x_BSHK, weight_K = primals
    back = mx.vjp(lambda x: mx.fast.rms_norm(x, None, EPS), [x_BSHK], [dy_BSHK * weight_K])[1]
    return back[0], mx.zeros_like(weight_K)


def rotate(x_BSHK: mx.array, rope: Sequence[mx.array]) -> mx.array:
    """Rotate each pair of neighbouring features by the angles of its row, in float32, and return the dtype of x.
    x_BSHK: (batch, rows, heads, head width); `rope`: cosines and sines, (rows, 1, head width) each, every value twice.
    (x0, x1) becomes cos (x0, x1) + sin (-x1, x0).
    """
    made: Any = _rotated(x_BSHK, *rope)
    y_BSHK: mx.array = made
    return y_BSHK


@mx.custom_function
def _rotated(x_BSHK: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    return _turned(x_BSHK, cos, sin, [[0, 1], [-1, 0]])


@_rotated.vjp  # type: ignore[untyped-decorator, unused-ignore]
def _rotated_vjp(primals: Any, dy_BSHK: mx.array, _: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    # Both features of a pair have one sine, so that the gradient is the same product with the inverse quarter turn.
    _, cos, sin = primals
    return _turned(dy_BSHK, cos, sin, [[0, -1], [1, 0]]), mx.zeros_like(cos), mx.zeros_like(sin)


def _turned(x_BSHK: mx.array, cos: mx.array, sin: mx.array, quarter: list[list[int]]) -> mx.array:
    """Return cos * x + sin * (x with every pair turned by 90 degrees), the turn being the 2 x 2 matrix `quarter`.
    The turn is a product with a matrix of zeros and ones: exact, and much faster than splitting and joining the pairs.
    """
    quarter_KK = mx.array(np.kron(np.eye(x_BSHK.shape[-1] // 2), quarter), x_BSHK.dtype)
    return (x_BSHK * cos + (x_BSHK @ quarter_KK) * sin).astype(x_BSHK.dtype)


def heads(x_BSD: mx.array, width: int) -> mx.array:
    """Split the features into heads of `width`: (batch, rows, features) to (batch, rows, heads, width)."""
    return x_BSD.reshape(*x_BSD.shape[:2], -1, width)


def placed(x_BSHK: mx.array, norm_K: mx.array, rope: Sequence[mx.array]) -> mx.array:
    """Prepare queries or keys for attention: RMSNorm with the weight norm_K, then the rotation `rope` by their positions."""
    return rotate(normed(x_BSHK, norm_K), rope)


def attend(q_BSHK: mx.array, k_BSHK: mx.array, v_BSHK: mx.array) -> mx.array:
    """Attention of all rows over all rows: queries, keys, values (batch, rows, heads, width) to (batch, rows, heads * width)."""
    q_BHSK, k_BHSK, v_BHSK = (x.swapaxes(1, 2) for x in (q_BSHK, k_BSHK, v_BSHK))
    y_BHSK = attention(q_BHSK, k_BHSK, v_BHSK, q_BSHK.shape[-1] ** -0.5)
    return y_BHSK.swapaxes(1, 2).flatten(2)
