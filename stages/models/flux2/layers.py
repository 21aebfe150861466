"""The operations within a FLUX.2 block: modulation, normalisation, rotary positions, gated feed-forward, attention.

Some have a gradient of their own, because MLX's keeps more in memory or takes more kernels.
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
    """Split the output `y_BN` of a modulation Linear into a list of arrays. Each array is repeated for `rows` rows and
    has the shape `(batch, rows, hidden)`. `hidden` is the width of the model. A `y_BN` of shape `(batch, 3 * hidden)`
    gives `[shift, 1 + scale, gate]`. A `y_BN` of shape `(batch, 6 * hidden)` gives three such arrays for attention,
    then three for feed-forward.

    1 is added to the scale here, once for all blocks.
    """
    parts = mx.split(y_BN, y_BN.shape[-1] // hidden, axis=-1)
    return spread([1 + part if at % 3 == 1 else part for at, part in enumerate(parts)], rows)


def spread(parts: Sequence[mx.array], rows: int) -> list[mx.array]:
    """Repeat each array (batch, hidden) of `parts` for every row. The result is a list of arrays (batch, `rows`, hidden). They
    are views and take no memory.

    This is done once for all blocks. Within a compiled block it would be one more kind of kernel, and each kind costs a GPU
    seconds to compile.
    """
    return [mx.broadcast_to(part_BD[:, None], (part_BD.shape[0], rows, part_BD.shape[1])) for part_BD in parts]


def modulate(x_BSD: mx.array, mods: list[mx.array]) -> mx.array:
    """Apply LayerNorm without weights to `x_BSD`, then multiply by `mods[1]` and add `mods[0]`. `mods` is a list of
    arrays: the shift, then 1 + scale. Any further arrays in `mods` are ignored. All these arrays and the result are
    (batch, rows, hidden). In each sample, a modulation has the same values in every row.

    On a GPU, the modulation of a single sample serves as weights of the norm, so that one kernel computes both. For several
    samples, the factors and terms have the same order as where the blocks add their gated outputs, so that one compiled
    kernel serves both. On a CPU, MLX has no kernel of the norm.
    """
    if x_BSD.shape[0] == 1 and kernels.compiles():
        y_BSD: mx.array = _weighted_layer_norm(x_BSD, mods[1][0, 0], mods[0][0, 0])
        return y_BSD
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
    """Return silu(first half) * second half, for the two halves of the last axis. x_BSF is (batch, rows, 2 F). The result is
    (batch, rows, F).
    """
    gate, up = mx.split(x_BSF, 2, axis=-1)
    return silu_times(gate, up)


def silu_times(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up, element by element. Both arrays have the same shape. silu(x) is x * sigmoid(x).

    On a GPU the gradient computes the sigmoid again, which is cheaper than storing it. On a CPU it is stored.
    """
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
    """Apply RMSNorm to each head. x_BSHK and the result are (batch, rows, heads, head width). weight_K is (head width,). The
    weight is treated as frozen: its gradient is zero.

    MLX's own gradient of the weight would be a sum over all rows.
    """
    y_BSHK: mx.array = _rms_norm_heads(x_BSHK, weight_K)
    return y_BSHK


@OwnGradient
def _rms_norm_heads(x_BSHK: mx.array, weight_K: mx.array) -> mx.array:
    return mx.fast.rms_norm(x_BSHK, weight_K, EPS)


@_rms_norm_heads.vjp
def _rms_norm_heads_vjp(primals: Any, dy_BSHK: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    x_BSHK, weight_K = primals
    back = mx.vjp(lambda x: mx.fast.rms_norm(x, None, EPS), [x_BSHK], [dy_BSHK * weight_K])[1]
    return back[0], mx.zeros_like(weight_K)


def rotate(x_BSHK: mx.array, rope: Sequence[mx.array]) -> mx.array:
    """Apply a rotary position embedding: rotate each pair of neighbouring features by an angle. `x_BSHK` and the result
    are `(batch, rows, heads, head width)`, of one dtype. `rope` is (cosines, sines) of the angles, both float32
    `(rows, 1, head width)`. Each angle occurs twice, once for each feature of its pair.

    A positive angle rotates the first feature towards the second. The rotation is computed in float32.
    """
    y_BSHK: mx.array = _rotated(x_BSHK, *rope)
    return y_BSHK


@OwnGradient
def _rotated(x_BSHK: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    return _rotate_pairs(x_BSHK, cos, sin, [[0, 1], [-1, 0]])


@_rotated.vjp
def _rotated_vjp(primals: Any, dy_BSHK: mx.array, _: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    # Both features of a pair have one sine, so that the gradient is the same product with the inverse quarter turn.
    _, cos, sin = primals
    return _rotate_pairs(dy_BSHK, cos, sin, [[0, -1], [1, 0]]), mx.zeros_like(cos), mx.zeros_like(sin)


def _rotate_pairs(x_BSHK: mx.array, cos: mx.array, sin: mx.array, quarter: list[list[int]]) -> mx.array:
    """Return `cos * x_BSHK + sin * turned`, in the dtype of `x_BSHK`. `turned` is `x_BSHK` with every pair (a, b) of
    neighbouring features replaced by the matrix product `[a, b] @ quarter`. `quarter` is a 2 x 2 matrix that turns a
    pair by 90 degrees. For example, `[a, b] @ [[0, 1], [-1, 0]]` is `[-b, a]`. `x_BSHK` and the result are `(batch,
    rows, heads, head width)`. `cos` and `sin` are `(rows, 1, head width)`.

    The turn is a product with a matrix of zeros and ones: exact, and much faster than splitting and joining the pairs.
    """
    quarter_KK = mx.array(np.kron(np.eye(x_BSHK.shape[-1] // 2), quarter), x_BSHK.dtype)
    return (x_BSHK * cos + kernels.product(x_BSHK, quarter_KK) * sin).astype(x_BSHK.dtype)


def split_heads(x_BSD: mx.array, width: int) -> mx.array:
    """Split the features into heads of `width` features. x_BSD is (batch, rows, features). The result is (batch, rows, features /
    width, width).
    """
    return x_BSD.reshape(*x_BSD.shape[:2], -1, width)


def norm_and_rotate(x_BSHK: mx.array, norm_K: mx.array, rope: Sequence[mx.array]) -> mx.array:
    """Apply RMSNorm to each head of queries or keys, then a rotary position embedding. `x_BSHK` and the result are
    (batch, rows, heads, head width). `norm_K` is the norm's weight, (head width,). `rope` is the pair (cosines, sines)
    of the angles, each (rows, 1, head width). Two neighbouring features form a pair and share one angle, so each angle
    occurs twice.
    """
    return rotate(rms_norm_heads(x_BSHK, norm_K), rope)


def attend(q_BSHK: mx.array, k_BSHK: mx.array, v_BSHK: mx.array) -> mx.array:
    """Compute full attention, every row to every row. Queries, keys and values are (batch, rows, heads, head width). The result
    is (batch, rows, heads * head width).
    """
    q_BHSK, k_BHSK, v_BHSK = (x.swapaxes(1, 2) for x in (q_BSHK, k_BSHK, v_BSHK))
    y_BHSK = attention(q_BHSK, k_BHSK, v_BHSK, q_BSHK.shape[-1] ** -0.5)
    return y_BHSK.swapaxes(1, 2).flatten(2)
