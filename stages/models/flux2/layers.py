"""The operations within a block. Some have a gradient of their own, as MLX's keeps more in memory or takes more kernels.

B batch, S rows, D hidden width, F feed-forward width, H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from stages import kernels
from stages.models.attention import attention
from stages.models.elementwise import sigmoid, silu, slow_exp
from stages.models.flux2.config import EPS
from stages.own_gradient import OwnGradient


def modulation(y_BN: mx.array, hidden: int, rows: int) -> list[mx.array]:
    """[shift, 1 + scale, gate] from (B, 3 D), twice (attention, feed-forward) from (B, 6 D); views (B, rows, D)."""
    parts = mx.split(y_BN, y_BN.shape[-1] // hidden, axis=-1)
    # 1 is added here, once for all blocks.
    return spread([1 + part if at % 3 == 1 else part for at, part in enumerate(parts)], rows)


def spread(parts: Sequence[mx.array], rows: int) -> list[mx.array]:
    # Once for all blocks: within a compiled block it would be one more kind of kernel, and each costs a GPU seconds to
    # compile.
    return [mx.broadcast_to(part_BD[:, None], (part_BD.shape[0], rows, part_BD.shape[1])) for part_BD in parts]


def modulate(x_BSD: mx.array, mods: list[mx.array]) -> mx.array:
    """LayerNorm without weights, times mods[1] (1 + scale), plus mods[0] (shift). Further arrays are ignored."""
    # On a GPU, the modulation of a single sample serves as weights of the norm: one kernel for both. On a CPU, MLX has no
    # kernel of the norm.
    if x_BSD.shape[0] == 1 and kernels.compiles():
        y_BSD: mx.array = _weighted_layer_norm(x_BSD, mods[1][0, 0], mods[0][0, 0])
        return y_BSD
    # The order of factors and terms is that in which blocks add their gated outputs, so that one compiled kernel serves both.
    return mx.fast.layer_norm(x_BSD, None, None, EPS) * mods[1] + mods[0]


@OwnGradient
def _weighted_layer_norm(x_BSD: mx.array, weight_D: mx.array, bias_D: mx.array) -> mx.array:
    return mx.fast.layer_norm(x_BSD, weight_D, bias_D, EPS)


@_weighted_layer_norm.vjp
def _weighted_layer_norm_vjp(primals: Any, dy_BSD: mx.array, _: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    # MLX's own gradient would sum over all rows for the weight and the bias, which are frozen.
    x_BSD, weight_D, bias_D = primals
    back = mx.vjp(lambda x: mx.fast.layer_norm(x, None, None, EPS), [x_BSD], [dy_BSD * weight_D])[1]
    return back[0], mx.zeros_like(weight_D), mx.zeros_like(bias_D)


def swiglu(x_BSF: mx.array) -> mx.array:
    gate, up = mx.split(x_BSF, 2, axis=-1)
    return silu_times(gate, up)


def silu_times(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up. On a GPU the gradient computes the sigmoid again, cheaper than storing it; on a CPU it is stored."""
    made: Any = _silu_times_stored(gate, up) if slow_exp(gate) else [_silu_times(gate, up)]
    y: mx.array = made[0]
    return y


@OwnGradient
def _silu_times(gate: mx.array, up: mx.array) -> mx.array:
    return silu(gate) * up


@_silu_times.vjp
def _silu_times_vjp(primals: Any, dy: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    # The dependencies on dy, and of one gradient on the other, keep the compiler from reusing the sigmoid of the forward
    # pass, which it would have to keep until here.
    gate, up = mx.depends(list(primals), [dy])
    share = mx.sigmoid(gate)
    dgate = dy * up * (share + gate * share * (1 - share))
    again = mx.depends([gate], [dgate])[0]
    return dgate, silu(again) * dy


@OwnGradient
def _silu_times_stored(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    share = sigmoid(gate)
    return gate * share * up, share


@_silu_times_stored.vjp
def _silu_times_stored_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
    (gate, up), (dy, _), share = primals, cotangents, outputs[1]
    dup = dy * (gate * share)
    return dy * share * up + dup * up * (1 - share), dup


def rms_norm_heads(x_BSHK: mx.array, weight_K: mx.array) -> mx.array:
    """RMSNorm of each head. The weight is frozen: its gradient is zero."""
    y_BSHK: mx.array = _rms_norm_heads(x_BSHK, weight_K)
    return y_BSHK


@OwnGradient
def _rms_norm_heads(x_BSHK: mx.array, weight_K: mx.array) -> mx.array:
    return mx.fast.rms_norm(x_BSHK, weight_K, EPS)


@_rms_norm_heads.vjp
def _rms_norm_heads_vjp(primals: Any, dy_BSHK: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    x_BSHK, weight_K = primals
    # MLX's own gradient of the weight would be a sum over all rows.
    back = mx.vjp(lambda x: mx.fast.rms_norm(x, None, EPS), [x_BSHK], [dy_BSHK * weight_K])[1]
    return back[0], mx.zeros_like(weight_K)


def rotate(x_BSHK: mx.array, rope: Sequence[mx.array]) -> mx.array:
    """Rotary positions, in float32. `rope` is (cosines, sines), each (S, 1, K), with one angle for both features of a pair."""
    y_BSHK: mx.array = _rotated(x_BSHK, *rope)
    return y_BSHK


@OwnGradient
def _rotated(x_BSHK: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    # A positive angle rotates the first feature of a pair towards the second.
    return _rotate_pairs(x_BSHK, cos, sin, [[0, 1], [-1, 0]])


@_rotated.vjp
def _rotated_vjp(primals: Any, dy_BSHK: mx.array, _: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    # Both features of a pair have one sine, so that the gradient is the same product with the inverse quarter turn.
    _, cos, sin = primals
    return _rotate_pairs(dy_BSHK, cos, sin, [[0, -1], [1, 0]]), mx.zeros_like(cos), mx.zeros_like(sin)


def _rotate_pairs(x_BSHK: mx.array, cos: mx.array, sin: mx.array, quarter: list[list[int]]) -> mx.array:
    # A turn by 90 degrees as a product with zeros and ones: exact, and much faster than splitting and joining the pairs.
    quarter_KK = mx.array(np.kron(np.eye(x_BSHK.shape[-1] // 2), quarter), x_BSHK.dtype)
    return (x_BSHK * cos + kernels.product(x_BSHK, quarter_KK) * sin).astype(x_BSHK.dtype)


def split_heads(x_BSD: mx.array, width: int) -> mx.array:
    return x_BSD.reshape(*x_BSD.shape[:2], -1, width)


def norm_and_rotate(x_BSHK: mx.array, norm_K: mx.array, rope: Sequence[mx.array]) -> mx.array:
    return rotate(rms_norm_heads(x_BSHK, norm_K), rope)


def attend(q_BSHK: mx.array, k_BSHK: mx.array, v_BSHK: mx.array) -> mx.array:
    """Every row to every row, (B, S, H, K) -> (B, S, H K)."""
    q_BHSK, k_BHSK, v_BHSK = (x.swapaxes(1, 2) for x in (q_BSHK, k_BSHK, v_BSHK))
    y_BHSK = attention(q_BHSK, k_BHSK, v_BHSK, q_BSHK.shape[-1] ** -0.5)
    return y_BHSK.swapaxes(1, 2).flatten(2)
