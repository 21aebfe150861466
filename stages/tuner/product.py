"""x W^T + scale (x A^T) B^T as one operation with a gradient of its own: W frozen, A and B trained or not there.

Two things that a framework's own gradient would do otherwise. The outputs can be had in parts, each from its rows of W:
a wide result that is split afterwards leaves views that most kernels copy first, and a gradient that is put together
again, both for every block and step. And the gradient by x is added up inside the products, not by passes of its own.

A packed W is unpacked for the product and again for its gradient, and kept for neither. Over thousands of rows this beats
a quantised product, which unpacks every tile of the weight once per tile of rows.

O outputs, c some of them, I inputs, R rank; x is (..., I).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx

from stages.tuner import quantize

Pair = tuple[mx.array, mx.array]  # A (R,I) and B (O,R), in the dtype of x


def matmul(x: mx.array, weight: quantize.Weight) -> mx.array:
    """x W^T, (..., O)."""
    return product(x, weight)[0]


def product(
    x: mx.array, weight: quantize.Weight, widths: Sequence[int] = (), pair: Pair | None = None, scale: float = 1.0
) -> list[mx.array]:
    """The outputs in parts of these widths, which make up O; in one, where none are given.

    `pair` is low-rank: its change is added within the products. The gradient goes to x and to the pair.
    """
    ends = list(accumulate(widths or [weight.shape[0]]))
    assert ends[-1] == weight.shape[0], f"parts of {list(widths)} do not make up {weight.shape[0]} outputs"
    # Row ranges, part by part: a large packed weight is unpacked some rows at a time.
    parts = [quantize.ranges(weight, start, end) for start, end in zip([0, *ends], ends, strict=False)]

    @mx.custom_function
    def forward(x: mx.array, *pair: mx.array) -> list[mx.array]:
        low = [scaled(x @ pair[0].T, scale)] if pair else []
        ys: list[mx.array] = []
        latest = x
        for part in parts:
            found = []
            for rows in part:
                latest = x @ _dense(weight, rows, latest).T
                # Added by the product: no pass over the outputs of its own.
                found.append(mx.addmm(latest, low[0], pair[1][rows].T) if pair else latest)
            ys.append(mx.concatenate(found, axis=-1) if len(found) > 1 else found[0])
        return [*ys, *low]

    @forward.vjp
    def backward(primals: Any, dys: list[mx.array], outputs: list[mx.array]) -> Any:
        x, *pair = primals if isinstance(primals, tuple | list) else [primals]
        dx = dlow = None
        dups: list[mx.array] = []
        for dy, part in zip(dys, parts, strict=False):
            for rows in part:
                own = dy[..., rows.start - part[0].start : rows.stop - part[0].start] if len(part) > 1 else dy
                # Made to follow what came before: the compiler would else see the forward pass's unpacking, and keep it.
                dx = _added(dx, own, _dense(weight, rows, own if dx is None else dx))
                if pair:
                    dlow = _added(dlow, own, pair[1][rows])
                    dups.append(_flat(own).T @ _flat(outputs[-1]))
        if dlow is None:
            return dx
        dlow = scaled(dlow, scale)
        return _added(dx, dlow, pair[0]), _flat(dlow).T @ _flat(x), mx.concatenate(dups) if len(dups) > 1 else dups[0]

    found: Any = forward(x, *(pair or ()))
    return list(found[: len(parts)])


def _dense(weight: quantize.Weight, rows: slice, after: mx.array) -> mx.array:
    """Some rows of W, (c,I); of a packed one not before `after` is computed, or all would be unpacked at once."""
    own = quantize.rows(weight, rows)
    return own if isinstance(own, mx.array) else quantize.following(own, after).dense()


def _added(sum_: mx.array | None, left: mx.array, right: mx.array) -> mx.array:
    """sum + left @ right, in one product."""
    return left @ right if sum_ is None else mx.addmm(sum_, left, right)


def _flat(x: mx.array) -> mx.array:
    """All rows of all samples under one another."""
    return x.reshape(-1, x.shape[-1])


def scaled(x: mx.array, scale: float) -> mx.array:
    """scale x; a scale of 1, which alpha = rank gives, costs nothing."""
    return x if scale == 1 else scale * x
