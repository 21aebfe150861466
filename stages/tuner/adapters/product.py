"""x W^T + scale (x A^T) B^T as one operation with its own gradient. c a chunk of the outputs, I inputs."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from stages import kernels
from stages.own_gradient import OwnGradient
from stages.tuner import quantize

Pair = tuple[mx.array, mx.array]  # A (rank, inputs) and B (outputs, rank), in the dtype of x


def product(x: mx.array, weight: quantize.Weight, pair: Pair | None = None, scale: float = 1.0) -> mx.array:
    """x W^T + scale (x A^T) B^T, or x W^T without `pair`. No gradient for `weight`, which may be packed."""
    # A packed W is unpacked for the product and again for its gradient, and kept for neither. Over thousands of tokens this
    # is faster than a quantised product, which unpacks every tile of W once per tile of tokens.
    chunks = quantize.row_chunks(weight, x.size // x.shape[-1])

    def project_down(x: mx.array, down: mx.array) -> mx.array:
        return scaled(kernels.linear(x, down), scale)

    # Automatic differentiation would pass over the wide outputs, and over the gradient of x, once more to add their terms.
    # Here they are added within the matrix products.
    @OwnGradient
    def forward(x: mx.array, *pair: mx.array) -> mx.array:
        low = project_down(x, pair[0]) if pair else None
        ys: list[mx.array] = []
        for rows in chunks:
            y = x @ _dense_rows(weight, rows, ys[-1] if ys else x).T
            ys.append(y if low is None else mx.addmm(y, low, pair[1][rows].T))
        return mx.concatenate(ys, axis=-1) if len(ys) > 1 else ys[0]

    @forward.vjp
    def backward(primals: Any, dy: mx.array, _: mx.array) -> Any:
        x, *pair = primals if isinstance(primals, tuple | list) else [primals]
        dx: mx.array | None = None
        for rows in chunks:
            # Each unpacking depends on the result before it: the compiler would otherwise reuse, and so keep, the forward one.
            dense_cI = _dense_rows(weight, rows, dy if dx is None else dx)
            dx = dy[..., rows] @ dense_cI if dx is None else mx.addmm(dx, dy[..., rows], dense_cI)
        assert dx is not None
        if not pair:
            return dx
        down, up = pair
        dlow = scaled(kernels.product(dy, up), scale)
        # x A^T is computed again: as an output of the forward pass it would make a recomputed block compute x W^T as well,
        # which the last Linear of that block does not need.
        by_down = kernels.product(_flat(dlow).T, _flat(x))
        by_up = kernels.product(_flat(dy).T, _flat(project_down(x, down)))
        return kernels.product(dlow, down, dx), by_down, by_up

    y: mx.array = forward(x, *(pair or ()))
    return y


def scaled(x: mx.array, scale: float) -> mx.array:
    # Without an operation if the scale is 1.
    return x if scale == 1 else scale * x


def _dense_rows(weight: quantize.Weight, rows: slice, after: mx.array) -> mx.array:
    # Unpacked only after `after` is computed, the result of the chunk before: one unpacked chunk in memory at a time.
    own = quantize.select_rows(weight, rows)
    return own if isinstance(own, mx.array) else quantize.unpack_after(own, after).dense()


def _flat(x: mx.array) -> mx.array:
    return x.reshape(-1, x.shape[-1])
