"""Limits on single kernels, by shapes alone. Models and the tuner split large products by them.

macOS ends a program whose GPU kernel runs too long while the display is on. No kernel on Metal therefore takes more than
`LIMIT` floating-point operations.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import mlx.core as mx

dispatch: Callable[..., None] = mx.async_eval  # start computing these arrays without waiting; MLX leaves it untyped
LIMIT = 0.25e12  # floating-point operations of one kernel: an estimated 0.1 s on the slowest Mac that MLX supports


def compiles() -> bool:
    """Return True if functions should be compiled with mx.compile on the default device. On a CPU the result is False, because
    compilation takes minutes there.
    """
    return mx.default_device() != mx.cpu


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a faster version of `function`, compiled with mx.compile. On a CPU, return `function` itself. The compiled
    version is kept for later calls. `function` must therefore be defined at the top level of a module.
    """
    return _compile(function) if compiles() else function


_compile = functools.cache(mx.compile)


def exact() -> bool:
    """Return True if MLX computes float32 products in full on a GPU: the environment variable `MLX_ENABLE_TF32` is "0"."""
    return os.environ.get("MLX_ENABLE_TF32") == "0"


def limited() -> bool:
    """Return True if the default device is a GPU that uses Metal. Each kernel there may take at most `LIMIT`
    floating-point operations.
    """
    return mx.metal.is_available() and mx.default_device() == mx.gpu


def product_flop(rows: int, inputs: int, outputs: int) -> float:
    """Return the floating-point operations of the product of a (rows, inputs) matrix and an (inputs, outputs) matrix."""
    return 2.0 * rows * inputs * outputs


def most_outputs(rows: int, inputs: int, multiple: int = 128) -> int | None:
    """Return how many output features (columns) of a matrix product one GPU kernel may compute, at least 1. The kernel
    may take at most `LIMIT` floating-point operations. `rows` and `inputs` are the shape of the input matrix. A number
    above `multiple` is rounded down to a multiple of `multiple`. For example, with `multiple` = 128, 300 becomes 256,
    and 100 stays 100. The result is None if the default device does not use Metal, because `LIMIT` holds only on Metal.
    """
    if not limited():
        return None
    most = int(LIMIT // product_flop(rows, inputs, 1))
    return max(1, most - most % multiple if most > multiple else most)


def most_items(flop: float) -> int | None:
    """Return how many items one GPU kernel may compute. This is the largest number of items that take at most `LIMIT`
    floating-point operations together. `flop` is the number of floating-point operations that one item takes. If `flop`
    is above `LIMIT`, the result is 1. If kernels have no limit on the default device, the result is None.
    """
    return max(1, int(LIMIT // flop)) if limited() else None


def slices(total: int, step: int | None) -> list[slice]:
    """Return slices of about equal length that cover `total` items in order. Each has at most `step` items. If `step` is None
    or at least `total`, the result is `[slice(None)]`, one slice of all items.
    """
    if step is None or step >= total:
        return [slice(None)]
    even = math.ceil(total / math.ceil(total / step))
    return [slice(start, min(start + even, total)) for start in range(0, total, even)]


def linear(x: mx.array, weight: mx.array) -> mx.array:
    """Return `x @ weight.T`. `x` has the shape `(..., inputs)`, and `weight` has the shape `(outputs, inputs)`. On
    Metal, a large product is split into several kernels, each with at most `LIMIT` floating-point operations where
    possible.
    """
    return product(x, weight.T)


def product(x: mx.array, right: mx.array, add: mx.array | None = None) -> mx.array:
    """Return `x @ right`, or `add + x @ right`. `x` has the shape `(..., inner)`, `right` has the shape `(inner, outputs)`, and
    `add` has that of the result, `(..., outputs)`. On Metal, a large product is split into several kernels, each with at most
    `LIMIT` floating-point operations where possible. Gradients are split in the same way.
    """
    found = slices(right.shape[1], most_outputs(x.size // x.shape[-1], right.shape[0]))
    if len(found) == 1:
        return x @ right if add is None else mx.addmm(add, x, right)
    parts = [x @ right[:, some] if add is None else mx.addmm(add[..., some], x, right[:, some]) for some in found]
    return mx.concatenate(parts, axis=-1)
