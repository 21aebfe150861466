"""Reads the tensors of a model one by one, casts them, checks that they are finite, and shows how much is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx

Arrays = dict[str, mx.array]

STRETCH = 1 << 22  # values that are checked at once, so that the check takes little memory
LARGE = 500_000_000  # bytes; smaller models are read at once, and nothing is said about them

_report: ContextVar[Callable[[int, int], None]] = ContextVar("report", default=lambda read, total: None)


@contextmanager
def reading(what: str, note: Callable[[str], None]) -> Iterator[None]:
    """Within it, `note` gets "reading the transformer: 3.1 of 7.8 GB" (sizes of unpacked tensors), and "" at the end."""
    shown = ""

    def report(read: int, total: int) -> None:
        nonlocal shown
        text = f"reading {what}: {read / 1e9:.1f} of {total / 1e9:.1f} GB"
        if total >= LARGE and text != shown:
            shown = text
            note(text)

    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)
        if shown:
            note("")


def evaluate_each(arrays: Arrays, dtype: Any, arrange: Callable[[str, mx.array], mx.array] | None) -> Arrays:
    """Casts to `dtype` or `dtype(name)`, then `arrange(name, tensor)`. Empties `arrays`. ValueError for infinity or NaN."""
    done: Arrays = {}
    report, total, read = _report.get(), sum(value.nbytes for value in arrays.values()), 0
    for key in list(arrays):
        # Out of the dict before the cast, so that its memory is freed afterwards.
        value = arrays.pop(key)
        read += value.nbytes
        wanted = dtype(key) if callable(dtype) else dtype
        if wanted is not None and mx.issubdtype(value.dtype, mx.floating):
            value = value.astype(wanted)
        check_finite(key, value)
        if arrange:
            value = arrange(key, value)
        mx.eval(value)
        done[key] = value
        report(read, total)
    return done


def check_finite(name: str, value: mx.array) -> None:
    """Raise ValueError if a floating-point tensor contains infinity or NaN."""
    if not mx.issubdtype(value.dtype, mx.floating):
        return
    mx.eval(value)
    flat = value.reshape(-1)
    for start in range(0, flat.size, STRETCH):
        if not mx.isfinite(flat[start : start + STRETCH]).all().item():
            raise ValueError(f"{name} has values that are infinite or not a number: the weights are damaged; fetch them again")
