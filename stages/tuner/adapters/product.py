"""x W^T + scale (x A^T) B^T as one operation with a gradient of its own: W frozen, A and B trained or not there.

What a framework would make of it passes over the wide outputs once more to add the low-rank change, and over the gradient
by x once more to add up its two terms. Here both are added within the products.

A packed W is unpacked for the product and again for its gradient, and kept for neither; a large one some rows at a time.
Over thousands of rows this beats a quantised product, which unpacks every tile of the weight once per tile of rows.

O outputs, c some of them, I inputs, R rank; x is (..., I).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from stages.tuner.blockwise import quantize

Pair = tuple[mx.array, mx.array]  # A (R,I) and B (O,R), in the dtype of x


def product(x: mx.array, weight: quantize.Weight, pair: Pair | None = None, scale: float = 1.0) -> mx.array:
    """The outputs, (..., O), with the low-rank change of `pair` where there is one. The gradient goes to x and to the pair."""
    chunks = quantize.chunks(weight)

    def low(x: mx.array, down: mx.array) -> mx.array:
        return scaled(x @ down.T, scale)

    @mx.custom_function
    def forward(x: mx.array, *pair: mx.array) -> mx.array:
        side = low(x, pair[0]) if pair else None
        ys: list[mx.array] = []
        for rows in chunks:
            y = x @ _dense(weight, rows, ys[-1] if ys else x).T
            ys.append(y if side is None else mx.addmm(y, side, pair[1][rows].T))
        return mx.concatenate(ys, axis=-1) if len(ys) > 1 else ys[0]

    @forward.vjp
    def backward(primals: Any, dy: mx.array, _: mx.array) -> Any:
        x, *pair = primals if isinstance(primals, tuple | list) else [primals]
        dx: mx.array | None = None
        for rows in chunks:
            # Made to follow what came before: the compiler would else see the forward pass's unpacking, and keep it.
            dense_cI = _dense(weight, rows, dy if dx is None else dx)
            dx = dy[..., rows] @ dense_cI if dx is None else mx.addmm(dx, dy[..., rows], dense_cI)
        assert dx is not None
        if not pair:
            return dx
        down, up = pair
        dlow = scaled(dy @ up, scale)
        # x A^T once more, though the forward pass has it: were it an output there, asking for it would ask for x W^T too, and
        # the last Linear of a block that is computed again for its gradient has no other use for that.
        return mx.addmm(dx, dlow, down), _flat(dlow).T @ _flat(x), _flat(dy).T @ _flat(low(x, down))

    found: Any = forward(x, *(pair or ()))
    y: mx.array = found
    return y


def scaled(x: mx.array, scale: float) -> mx.array:
    """scale x; a scale of 1, which alpha = rank gives, costs nothing."""
    return x if scale == 1 else scale * x


def _dense(weight: quantize.Weight, rows: slice, after: mx.array) -> mx.array:
    """Some rows of W, (c,I); of a packed one not before `after` is computed, or all would be unpacked at once."""
    own = quantize.rows(weight, rows)
    return own if isinstance(own, mx.array) else quantize.following(own, after).dense()


def _flat(x: mx.array) -> mx.array:
    """All rows of all samples under one another."""
    return x.reshape(-1, x.shape[-1])
