"""Layers that transformers of pictures share. Some have a gradient of their own, as MLX's keeps more in memory or takes more
kernels.

B batch, S rows, D hidden width, F feed-forward width, H heads, K head width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from stages import kernels
from stages.models.attention import attention, sigmoid, silu, slow_exp
from stages.own_gradient import OwnGradient

Quarter = tuple[tuple[int, int], tuple[int, int]]  # a turn by 90 degrees


def tokens(x_BCHW: mx.array) -> mx.array:
    """(B, C, H, W) -> (B, H W, C), row by row."""
    return x_BCHW.reshape(*x_BCHW.shape[:2], -1).swapaxes(1, 2)


def spread(parts: Sequence[mx.array], rows: int) -> list[mx.array]:
    # Once for all blocks: within a compiled block it would be one more kind of kernel, and each costs a GPU seconds to
    # compile.
    return [mx.broadcast_to(part_BD[:, None], (part_BD.shape[0], rows, part_BD.shape[1])) for part_BD in parts]


EPS = 1e-6  # of LayerNorms, in every released model


def modulation(y_BN: mx.array, hidden: int, rows: int) -> list[mx.array]:
    """[shift, 1 + scale, gate] from (B, 3 D), twice (attention, feed-forward) from (B, 6 D); views (B, rows, D)."""
    parts = mx.split(y_BN, y_BN.shape[-1] // hidden, axis=-1)
    # 1 is added here, once for all blocks.
    return spread([1 + part if at % 3 == 1 else part for at, part in enumerate(parts)], rows)


def modulate(x_BSD: mx.array, mods: list[mx.array]) -> mx.array:
    """LayerNorm without weights, times mods[1] (1 + scale), plus mods[0] (shift). Further arrays are ignored."""
    # On a GPU, the modulation of a single sample serves as weights of the norm: one kernel for both. On a CPU, MLX has no
    # kernel of the norm.
    if x_BSD.shape[0] == 1 and kernels.compiles():
        return _weighted_layer_norm(x_BSD, mods[1][0, 0], mods[0][0, 0])
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
    return _silu_times_stored(gate, up)[0] if slow_exp(gate) else _silu_times(gate, up)


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


@OwnGradient
def rotate(x_BSHK: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotary positions, in float32. Cosines and sines are (S, 1, K), with one angle for both features of a pair."""
    # A positive angle rotates the first feature of a pair towards the second.
    return _rotate_pairs(x_BSHK, cos, sin, ((0, 1), (-1, 0)))


@rotate.vjp
def _rotate_vjp(primals: Any, dy_BSHK: mx.array, _: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    # Both features of a pair have one sine, so that the gradient is the same product with the inverse quarter turn.
    _, cos, sin = primals
    return _rotate_pairs(dy_BSHK, cos, sin, ((0, -1), (1, 0))), mx.zeros_like(cos), mx.zeros_like(sin)


@functools.cache
def _quarters(pairs: int, quarter: Quarter) -> np.ndarray:
    return np.kron(np.eye(pairs), quarter)


def _rotate_pairs(x_BSHK: mx.array, cos: mx.array, sin: mx.array, quarter: Quarter) -> mx.array:
    # A turn by 90 degrees as a product with zeros and ones: exact, and much faster than splitting and joining the pairs.
    quarter_KK = mx.array(_quarters(x_BSHK.shape[-1] // 2, quarter), x_BSHK.dtype)
    return (x_BSHK * cos + kernels.product(x_BSHK, quarter_KK) * sin).astype(x_BSHK.dtype)


def split_heads(x_BSD: mx.array, width: int) -> mx.array:
    return x_BSD.reshape(*x_BSD.shape[:2], -1, width)


def attend(q_BSHK: mx.array, k_BSHK: mx.array, v_BSHK: mx.array) -> mx.array:
    """Every row to every row, (B, S, H, K) -> (B, S, H K)."""
    q_BHSK, k_BHSK, v_BHSK = (x.swapaxes(1, 2) for x in (q_BSHK, k_BSHK, v_BSHK))
    y_BHSK = attention(q_BHSK, k_BHSK, v_BHSK, q_BSHK.shape[-1] ** -0.5)
    return y_BHSK.swapaxes(1, 2).flatten(2)


def sinusoid(value_B: mx.array, width: int) -> mx.array:
    """(B, width) float32, cosines first. The frequencies fall from 1 to 1/10000."""
    # Exponents are rounded to float32 as in Black Forest Labs' code: the last bit of a frequency changes the angle a
    # thousandfold. The sinusoid is float32, as bfloat16 would round 937 to 936.
    half = width // 2
    exponents = np.float32(-math.log(10000)) * np.arange(half, dtype=np.float32) / np.float32(half)
    freqs = mx.array(np.exp(exponents.astype(np.float64)), mx.float32)
    angles = value_B[:, None] * freqs
    return mx.concatenate([mx.cos(angles), mx.sin(angles)], axis=-1)


class RotaryShapes:
    """`RotaryTables` whose values are never computed, for estimates."""

    def __init__(self, axes: Sequence[int]) -> None:
        self.width = sum(axes)

    def __call__(self, ids_SN: np.ndarray) -> list[mx.array]:
        return [mx.zeros((len(ids_SN), 1, self.width))] * 2


TABLES_KEPT = 32  # rotary tables in memory: one per image shape, 2.4 MB at 1024 px


class RotaryTables:
    """tables(ids_SN) -> [cosines, sines], float32 (S, 1, K), equal for features 2n and 2n + 1. Angles are float64."""

    def __init__(self, axes: Sequence[int], theta: float) -> None:
        """`axes`: features that each of the N axes of positions rotates."""
        self.freqs = [theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim) for dim in axes]
        self.kept: dict[bytes, list[mx.array]] = {}

    def __call__(self, ids_SN: np.ndarray) -> list[mx.array]:
        ids_SN = np.asarray(ids_SN, np.float64)
        key = ids_SN.tobytes()
        if key not in self.kept:
            angles_SP = np.concatenate([ids_SN[:, i, None] * f for i, f in enumerate(self.freqs)], axis=-1)
            pair = (turn(angles_SP).repeat(2, axis=-1)[:, None] for turn in (np.cos, np.sin))
            self.kept[key] = [mx.array(each, mx.float32) for each in pair]
            if len(self.kept) > TABLES_KEPT:
                self.kept.pop(next(iter(self.kept)))
        return self.kept[key]
