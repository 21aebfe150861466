"""LoKr: y = x (W + scale w1 (x) w2)^T, (x) the Kronecker product. As in LyCORIS (Yeh et al. 2024, arXiv 2309.14859).

w1 is (a, b) and w2 (c, d), with a c = outputs and b d = inputs. w2 is w2_a (c, R) times w2_b (R, d), or one whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import mlx.core as mx

from stages import kernels

W1, W2, W2_A, W2_B = ".lokr_w1", ".lokr_w2", ".lokr_w2_a", ".lokr_w2_b"


def factorize(dimension: int, factor: int | None) -> tuple[int, int]:
    """(m, n) with m n = dimension, m the largest divisor up to sqrt(dimension) and `factor`."""
    # PEFT and LyCORIS give the same result for any factor up to sqrt(dimension).
    most = math.isqrt(dimension) if factor is None else min(factor, math.isqrt(dimension))
    m = next(n for n in range(most, 0, -1) if dimension % n == 0)
    return m, dimension // m


def array_shapes(outputs: int, inputs: int, rank: int, factor: int | None) -> dict[str, tuple[int, int]]:
    (a, c), (b, d) = factorize(outputs, factor), factorize(inputs, factor)
    # LyCORIS' rule. A whole w2 has no rank to divide alpha by, so its scale is 1.
    if rank < max(c, d) / 2:
        return {W1: (a, b), W2_A: (c, rank), W2_B: (rank, d)}
    return {W1: (a, b), W2: (c, d)}


def second_factor_shape(arrays: Mapping[str, mx.array]) -> tuple[int, int]:
    """(c, d) of w2, whole or low-rank."""
    first, last = (arrays[W2], arrays[W2]) if W2 in arrays else (arrays[W2_A], arrays[W2_B])
    return first.shape[0], last.shape[1]


def output_change(x: mx.array, arrays: Mapping[str, mx.array]) -> mx.array:
    """x (w1 (x) w2)^T, not yet scaled, in the dtype of `x`."""
    # The Kronecker product is never built in training.
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
    # `left` times each matrix of `right`; on Metal, a large stack in several kernels.
    flat = right.reshape(-1, *right.shape[-2:])
    rows, inner = left.shape
    found = kernels.slices(flat.shape[0], kernels.most_items(kernels.product_flop(rows, inner, flat.shape[-1])))
    if len(found) == 1:
        return left @ right
    whole = mx.concatenate([left @ flat[some] for some in found])
    return whole.reshape(*right.shape[:-2], *whole.shape[-2:])


def kronecker(arrays: Mapping[str, mx.array]) -> mx.array:
    """w1 (x) w2, (outputs, inputs) float32, not yet scaled."""
    w2_cd = arrays[W2] if W2 in arrays else arrays[W2_A].astype(mx.float32) @ arrays[W2_B].astype(mx.float32)
    return mx.kron(arrays[W1].astype(mx.float32), w2_cd.astype(mx.float32))
