"""Limits on single kernels, by shapes alone. Models and the tuner split large products by them."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx

Arrays = dict[str, mx.array]  # by name

dispatch: Callable[..., None] = mx.async_eval  # start computing these arrays without waiting; MLX leaves it untyped
# macOS ends a program whose GPU kernel runs too long while the display is on.
LIMIT = 0.25e12  # floating-point operations of one kernel: an estimated 0.1 s on the slowest Mac that MLX supports


def compiles() -> bool:
    # Compilation takes minutes on a CPU.
    return mx.default_device() != mx.cpu


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` through mx.compile, except on a CPU. Cached: `function` must be defined at the top level of a module."""
    return _compile(function) if compiles() else function


_compile = functools.cache(mx.compile)


_DIFFERENTIATED = ContextVar("differentiated", default=True)


@contextmanager
def forward_only() -> Iterator[None]:
    """Nothing that is computed, or traced by mx.compile, within it is differentiated: kernels without a gradient may serve."""
    token = _DIFFERENTIATED.set(False)
    try:
        yield
    finally:
        _DIFFERENTIATED.reset(token)


def differentiated() -> bool:
    return _DIFFERENTIATED.get()


def exact() -> bool:
    """Whether a GPU computes float32 products in full."""
    return os.environ.get("MLX_ENABLE_TF32") == "0"


def limited() -> bool:
    return mx.metal.is_available() and mx.default_device() == mx.gpu


def product_flop(rows: int, inputs: int, outputs: int) -> float:
    return 2.0 * rows * inputs * outputs


def most_outputs(rows: int, inputs: int, multiple: int = 128) -> int | None:
    """Columns of a product that one kernel may compute, rounded down to `multiple`; None: no limit."""
    if not limited():
        return None
    most = int(LIMIT // product_flop(rows, inputs, 1))
    return max(1, most - most % multiple if most > multiple else most)


def most_items(flop: float) -> int | None:
    """Items of `flop` operations each that one kernel may compute; None: no limit."""
    return max(1, int(LIMIT // flop)) if limited() else None


def slices(total: int, step: int | None) -> list[slice]:
    """Slices of about equal length, each of at most `step` items."""
    if step is None or step >= total:
        return [slice(None)]
    even = math.ceil(total / math.ceil(total / step))
    return [slice(start, min(start + even, total)) for start in range(0, total, even)]


def linear(x: mx.array, weight: Any) -> mx.array:
    """`x @ weight.T`: x is (..., inputs), weight (outputs, inputs), or packed, with `dense()`."""
    return product(x, (weight if isinstance(weight, mx.array) else weight.dense()).T)


def product(x: mx.array, right: mx.array, add: mx.array | None = None) -> mx.array:
    """`x @ right`, or `add + x @ right`: x is (..., inner), right (inner, outputs). Gradients are split in the same way."""
    found = slices(right.shape[1], most_outputs(x.size // x.shape[-1], right.shape[0]))
    if len(found) == 1:
        return x @ right if add is None else mx.addmm(add, x, right)
    parts = [x @ right[:, some] if add is None else mx.addmm(add[..., some], x, right[:, some]) for some in found]
    return mx.concatenate(parts, axis=-1)
