"""LoKr: y = x (W + scale w1 (x) w2)^T, where (x) is the Kronecker product. As in LyCORIS (Yeh et al. 2024, arXiv 2309.14859).

w1 has shape (a, b) and w2 (c, d), with a c = outputs and b d = inputs. w2 is low-rank, w2_a (c, R) times w2_b (R, d), if the
rank R is below half its larger side, and one whole matrix otherwise; a whole w2 has no rank to divide alpha by, so its scale
is 1. The Kronecker product is never built in training. w1 starts random and w2, or its w2_b, at zero, so that the first step
sees the base model exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import mlx.core as mx

from stages import kernels

W1, W2, W2_A, W2_B = ".lokr_w1", ".lokr_w2", ".lokr_w2_a", ".lokr_w2_b"


def factorize(dimension: int, factor: int | None) -> tuple[int, int]:
    """Return (m, n) with m * n = dimension and m <= n. m is the largest divisor of `dimension` that is at most sqrt(dimension)
    and at most `factor`. If `factor` is None, only sqrt(dimension) bounds m.

    PEFT and LyCORIS give the same result for any factor up to sqrt(dimension).
    """
    most = math.isqrt(dimension) if factor is None else min(factor, math.isqrt(dimension))
    m = next(n for n in range(most, 0, -1) if dimension % n == 0)
    return m, dimension // m


def array_shapes(outputs: int, inputs: int, rank: int, factor: int | None) -> dict[str, tuple[int, int]]:
    """Return the shapes of a LoKr adapter's arrays for one Linear, as a dict from suffix to shape. `outputs` and
    `inputs` are the numbers of rows and columns of the Linear's weight. ".lokr_w1" has the shape `(a, b)`, and
    ".lokr_w2" has the shape `(c, d)`, with `a * c = outputs` and `b * d = inputs`. `factor` is the largest allowed `a`
    and `b`; None means no such limit. If `rank` is below `max(c, d) / 2`, two arrays of this rank replace ".lokr_w2".

    `factorize` chooses `a`, `b`, `c` and `d`. The two arrays are ".lokr_w2_a" with the shape `(c, rank)`, and
    ".lokr_w2_b" with the shape `(rank, d)`.
    """
    (a, c), (b, d) = factorize(outputs, factor), factorize(inputs, factor)
    if rank < max(c, d) / 2:
        return {W1: (a, b), W2_A: (c, rank), W2_B: (rank, d)}
    return {W1: (a, b), W2: (c, d)}


def second_factor_shape(arrays: Mapping[str, mx.array]) -> tuple[int, int]:
    """Return the shape (c, d) of w2, the second factor of a LoKr adapter's Kronecker product. `arrays` maps suffixes to the
    arrays of one Linear. It contains either ".lokr_w2" or the low-rank pair ".lokr_w2_a" (c, rank) and ".lokr_w2_b" (rank, d).
    """
    first, last = (arrays[W2], arrays[W2]) if W2 in arrays else (arrays[W2_A], arrays[W2_B])
    return first.shape[0], last.shape[1]


def output_change(x: mx.array, arrays: Mapping[str, mx.array]) -> mx.array:
    """Return the change that a LoKr adapter makes to the output of its Linear, without the scale. It is `x` times the
    transposed Kronecker product of the adapter's matrices `w1` and `w2`. The caller multiplies it by the adapter's
    scale. `x` has the shape `(..., inputs)`. `arrays` maps suffixes, such as ".lokr_w1", to the adapter's arrays for
    this Linear. The result has the shape `(..., outputs)` and the dtype of `x`.
    """
    w1_ab = arrays[W1].astype(x.dtype)
    a, b = w1_ab.shape
    x_bd = x.reshape(*x.shape[:-1], b, -1)
    if W2 in arrays:
        w2_cd = arrays[W2].astype(x.dtype)
        c, d = w2_cd.shape
        # Multiply in the order that has the smaller intermediate array.
        first = b * c <= a * d
        y_ac = _each(w1_ab, kernels.linear(x_bd, w2_cd)) if first else kernels.linear(_each(w1_ab, x_bd), w2_cd)
    else:
        w2_cR, w2_Rd = arrays[W2_A].astype(x.dtype), arrays[W2_B].astype(x.dtype)
        y_ac = kernels.linear(_each(w1_ab, kernels.linear(x_bd, w2_Rd)), w2_cR)
    return y_ac.reshape(*x.shape[:-1], -1)


def _each(left: mx.array, right: mx.array) -> mx.array:
    """Return `left @ right` for every matrix in a stack. `left` is one matrix (rows, inner). `right` is the stack, (...,
    inner, columns). On Metal, a large stack is computed in several kernels.
    """
    flat = right.reshape(-1, *right.shape[-2:])
    rows, inner = left.shape
    found = kernels.slices(flat.shape[0], kernels.most_items(kernels.product_flop(rows, inner, flat.shape[-1])))
    if len(found) == 1:
        return left @ right
    whole = mx.concatenate([left @ flat[some] for some in found])
    return whole.reshape(*right.shape[:-2], *whole.shape[-2:])


def kronecker(arrays: Mapping[str, mx.array]) -> mx.array:
    """Return the change that a LoKr adapter makes to the weight of its Linear, without the scale. It is the Kronecker
    product of the adapter's matrices `w1` and `w2`. The caller multiplies it by the adapter's scale. `arrays` maps
    suffixes, such as ".lokr_w1", to the adapter's arrays for this Linear. The result is a float32 array of shape
    `(outputs, inputs)`.
    """
    w2_cd = arrays[W2] if W2 in arrays else arrays[W2_A].astype(mx.float32) @ arrays[W2_B].astype(mx.float32)
    return mx.kron(arrays[W1].astype(mx.float32), w2_cd.astype(mx.float32))
