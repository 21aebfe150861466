"""LoKr: y = x (W + scale w1 (x) w2)^T, (x) the Kronecker product. As LyCORIS has it (Yeh et al. 2024, arXiv 2309.14859).

w1 (a, b) and w2 (c, d) with a c = outputs, b d = inputs. w2 is low-rank, w2_a (c, R) w2_b (R, d), if R is below half its
larger side, and whole otherwise; a whole w2 has no rank to divide alpha by, and a scale of 1. The product is never built.
w1 starts random; w2, or its w2_b, at zero, so that the first step sees the base exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import mlx.core as mx

W1, W2, W2_A, W2_B = ".lokr_w1", ".lokr_w2", ".lokr_w2_a", ".lokr_w2_b"


def factors(dimension: int, factor: int | None) -> tuple[int, int]:
    """dimension as a product (m, n), m <= n: m is the largest divisor up to `factor`, or up to the root where that is None.

    PEFT and LyCORIS come to the same for any factor that is not above the root.
    """
    most = math.isqrt(dimension) if factor is None else min(factor, math.isqrt(dimension))
    m = next(n for n in range(most, 0, -1) if dimension % n == 0)
    return m, dimension // m


def shapes(outputs: int, inputs: int, rank: int, factor: int | None) -> dict[str, tuple[int, int]]:
    """The arrays of one Linear, and their shapes."""
    (a, c), (b, d) = factors(outputs, factor), factors(inputs, factor)
    if rank < max(c, d) / 2:
        return {W1: (a, b), W2_A: (c, rank), W2_B: (rank, d)}
    return {W1: (a, b), W2: (c, d)}


def change(x: mx.array, arrays: Mapping[str, mx.array]) -> mx.array:
    """x (w1 (x) w2)^T, unscaled: (..., b d) to (..., a c). The arrays are keyed by their endings."""
    w1_ab = arrays[W1].astype(x.dtype)
    a, b = w1_ab.shape
    x_bd = x.reshape(*x.shape[:-1], b, -1)
    if W2 in arrays:
        w2_cd = arrays[W2].astype(x.dtype)
        c, d = w2_cd.shape
        y_ac = w1_ab @ (x_bd @ w2_cd.T) if b * c <= a * d else (w1_ab @ x_bd) @ w2_cd.T  # the smaller one between
    else:
        w2_cR, w2_Rd = arrays[W2_A].astype(x.dtype), arrays[W2_B].astype(x.dtype)
        y_ac = (w1_ab @ (x_bd @ w2_Rd.T)) @ w2_cR.T
    return y_ac.reshape(*x.shape[:-1], -1)


def product(arrays: Mapping[str, mx.array]) -> mx.array:
    """w1 (x) w2 itself, (O,I) float32."""
    w2_cd = arrays[W2] if W2 in arrays else arrays[W2_A].astype(mx.float32) @ arrays[W2_B].astype(mx.float32)
    return mx.kron(arrays[W1].astype(mx.float32), w2_cd.astype(mx.float32))
