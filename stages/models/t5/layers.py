"""The operations within a T5 block.

Some have a gradient of their own, as MLX's keeps more in memory or computes gradients of frozen weights.
T tokens of all parts, B texts of a part, b texts of a chunk, L tokens of a text, D model width, H heads, K head width.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np

from stages.kernels import compiles, most_items, product_flop, slices
from stages.models.attention import FUSED_ROWS, after, fused_forward, fused_gradient, one_layout
from stages.models.elementwise import sigmoid, slow_exp, softmax
from stages.own_gradient import OwnGradient

HIDDEN = -1e9  # added to the scores of padding
# Bytes of a chunk's scores on a CPU: about what its cache holds. Scores of 8 MB take a third more time.
CHUNK_BYTES = 2 << 20
STEEP, CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715  # gelu(x) = x sigmoid(STEEP (x + CUBIC x^3))


def buckets(length: int, count: int, furthest: int) -> np.ndarray:
    """(length, length) int32: the bucket of the key of column j for the query of row i, below `count`.

    The upper half is for keys after the query. A small distance has its own bucket; larger ones share buckets of growing range,
    and all from `furthest` on share one.
    """
    offset = np.arange(length)[None, :] - np.arange(length)[:, None]
    half = count // 2
    exact = half // 2
    distance = np.abs(offset)
    # float64 on the host: in float32 a device may round a power to the wrong bucket.
    ratio = np.log(np.maximum(distance, 1) / exact) / math.log(furthest / exact)
    far = np.minimum(exact + (ratio * (half - exact)).astype(np.int64), half - 1)
    near = np.where(distance < exact, distance, far)
    found: np.ndarray = (near + half * (offset > 0)).astype(np.int32)
    return found


def rms_norm(x: mx.array, weight_D: mx.array, eps: float) -> mx.array:
    """Over the last axis. The weight is a constant without gradient."""

    @OwnGradient
    def forward(x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, weight_D, eps)

    @forward.vjp
    def backward(x: mx.array, dy: mx.array, _: mx.array) -> mx.array:
        return mx.vjp(lambda x: mx.fast.rms_norm(x, None, eps), [x], [dy * weight_D])[1][0]

    y: mx.array = forward(x)
    return y


def gelu_times(gate: mx.array, up: mx.array) -> mx.array:
    """gelu(gate) * up with GELU in its tanh form, as in T5 v1.1. Computed in float32, returned in the dtype of `up`."""
    made: Any = _gelu_times_kept(gate, up) if slow_exp(gate) else _gelu_times(gate, up)
    y: mx.array = made[0] if slow_exp(gate) else made
    return y


@OwnGradient
def _gelu_times_kept(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    wide, share = _wide_and_share(gate)
    return wide * share * up, share


@_gelu_times_kept.vjp
def _gelu_times_kept_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
    (gate, up), (_, share), dy = primals, outputs, cotangents[0]
    return dy * up * _slope(gate, share), dy * (gate * share)


def _slope(wide: mx.array, share: mx.array) -> mx.array:
    # The derivative of wide * share.
    return share + (share - share * share) * (wide * (STEEP + 3 * STEEP * CUBIC * (wide * wide)))


@OwnGradient
def _gelu_times(gate: mx.array, up: mx.array) -> mx.array:
    wide, share = _wide_and_share(gate)
    return (wide * share * up.astype(mx.float32)).astype(up.dtype)


@_gelu_times.vjp
def _gelu_times_vjp(primals: Any, dy: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    # Each dependency keeps the compiler from reusing, and so keeping, float32 values of an earlier product: every product
    # is then one kernel that reads and writes half precision. Without a compiler, each value is computed once.
    gate, up = mx.depends(list(primals), [dy])
    wide, share = _wide_and_share(gate)
    by_up = dy.astype(mx.float32)
    dgate = (by_up * up.astype(mx.float32) * _slope(wide, share)).astype(gate.dtype)
    if compiles():
        gate, dy = mx.depends([gate, dy], [dgate])
        wide, share = _wide_and_share(gate)
        by_up = dy.astype(mx.float32)
    return dgate, (by_up * (wide * share)).astype(up.dtype)


def _wide_and_share(gate: mx.array) -> tuple[mx.array, mx.array]:
    # gelu(x) = x share, share = (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3).
    wide = gate.astype(mx.float32)
    return wide, sigmoid(wide * (STEEP + STEEP * CUBIC * (wide * wide)))


def attend(q_BHLK: mx.array, k_BHLK: mx.array, v_BHLK: mx.array, mask_BHLL: mx.array) -> mx.array:
    """softmax(q k^T + mask) v. The mask gets no gradient. Probabilities are stored only where softmax is slow."""
    # Scores are not scaled anywhere: T5's weights contain that factor.
    if slow_exp(q_BHLK):
        return _attend_kept(mx.contiguous(q_BHLK), mx.contiguous(k_BHLK), mx.contiguous(v_BHLK), mask_BHLL)
    # cuDNN's gradient with a mask is wrong for some lengths that are no multiple of 128: NaN for an odd multiple of 64.
    if fused_gradient(q_BHLK) and q_BHLK.shape[2] % FUSED_ROWS == 0:
        return one_layout(mx.fast.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, scale=1.0, mask=mask_BHLL))

    B, H, L, K = q_BHLK.shape
    parts = slices(B, most_items(2 * H * product_flop(L, K, L)))

    def probabilities(q_bHLK: mx.array, k_bHLK: mx.array, part: slice) -> mx.array:
        return softmax(q_bHLK @ k_bHLK.swapaxes(-1, -2) + mask_BHLL[part])

    @OwnGradient
    def forward(q_BHLK: mx.array, k_BHLK: mx.array, v_BHLK: mx.array) -> mx.array:
        done: list[mx.array] = []
        if fused_forward(q_BHLK):
            for part in parts:
                q, k, v = q_BHLK[part], k_BHLK[part], v_BHLK[part]
                done.append(mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask_BHLL[part]))
            return mx.concatenate(done) if len(done) > 1 else done[0]
        for part in parts:
            q_bHLK = after(q_BHLK[part], done[-1:])
            done.append(probabilities(q_bHLK, k_BHLK[part], part) @ v_BHLK[part])
        return mx.concatenate(done)

    @forward.vjp
    def backward(primals: Any, dy_BHLK: mx.array, y_BHLK: mx.array) -> list[mx.array]:
        done: list[tuple[mx.array, ...]] = []
        for part in parts:
            before = list(done[-1]) if done else [dy_BHLK]
            q, k, v, dy, y = mx.depends([x[part] for x in (*primals, dy_BHLK, y_BHLK)], before)
            done.append(_pull(q, k, v, probabilities(q, k, part), y, dy))
        return [mx.concatenate(list(each)) for each in zip(*done, strict=True)]

    y_BHLK: mx.array = forward(q_BHLK, k_BHLK, v_BHLK)
    return y_BHLK


def _attend_kept(q_BHLK: mx.array, k_BHLK: mx.array, v_BHLK: mx.array, mask_BHLL: mx.array) -> mx.array:
    """`attend` for a few texts at a time, with the probabilities stored for the gradient."""
    B, H, L, _ = q_BHLK.shape
    parts = slices(B, max(1, CHUNK_BYTES // (4 * H * L * L)))

    @OwnGradient
    def forward(q_BHLK: mx.array, k_BHLK: mx.array, v_BHLK: mx.array) -> list[mx.array]:
        done: list[mx.array] = []
        kept: list[mx.array] = []
        for part in parts:
            q_bHLK = after(q_BHLK[part], done[-1:])
            kept.append(softmax(q_bHLK @ k_BHLK[part].swapaxes(-1, -2) + mask_BHLL[part]))
            done.append(kept[-1] @ v_BHLK[part])
        return [mx.concatenate(done), *kept]

    @forward.vjp
    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        y_BHLK, *kept = outputs
        dy_BHLK = mx.contiguous(cotangents[0])
        done: list[tuple[mx.array, ...]] = []
        for part, p_bHLL in zip(parts, kept, strict=True):
            before = list(done[-1]) if done else [dy_BHLK]
            q, k, v, y, dy = mx.depends([x[part] for x in (*primals, y_BHLK, dy_BHLK)], before)
            done.append(_pull(q, k, v, p_bHLL, y, dy))
        return [mx.concatenate(list(each)) for each in zip(*done, strict=True)]

    made: Any = forward(q_BHLK, k_BHLK, v_BHLK)
    y_BHLK: mx.array = made[0]
    return y_BHLK


def _pull(q: mx.array, k: mx.array, v: mx.array, p_bHLL: mx.array, y: mx.array, dy: mx.array) -> tuple[mx.array, ...]:
    # sum(dp * p) over keys, as sum(dy * y).
    pull_bHL1 = (dy.astype(mx.float32) * y).sum(-1, keepdims=True)
    ds_bHLL = (p_bHLL * (dy @ v.swapaxes(-1, -2) - pull_bHL1)).astype(q.dtype)
    return ds_bHLL @ k, ds_bHLL.swapaxes(-1, -2) @ q, p_bHLL.swapaxes(-1, -2) @ dy
