"""Activations as strips of rows, so that a convolution of a large image needs memory for one strip at a time.

No strip of a convolution's input or output takes more than `strip_bytes()`, no kernel more operations than `kernels.LIMIT`.
Small images are one strip. A convolution reads the rows beside its strip too, and statistics of a norm are sums over all
strips, so results are equal up to rounding. B batch, R rows of a strip, W width, C channels, G groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import mlx.core as mx

from stages import kernels

STRIP_BYTES = 32 << 20  # of one strip of float32 values: 256 x 256 positions of 128 channels
# On a GPU, which smaller strips leave idle: an H200 encodes in half the time of 32 MiB. Exact products gain nothing from large
# strips, and their convolutions need memory in proportion: 3.48 GB in place of 2.10 GB at 1024 px.
GPU_STRIP_BYTES = 128 << 20
ITEM = 4  # bytes: strips have the same rows in every dtype
IN_FLIGHT = 2  # strips of full size that a GPU has started and not finished: one is computed while the next is prepared


class StripQueue:
    """Strips in computation: on a GPU, unfinished ones take at most two strips of full size; on a CPU each is waited for."""

    def __init__(self) -> None:
        self.started: deque[tuple[mx.array, int]] = deque()  # with the values that its computation holds
        self.values = 0

    def start(self, x: mx.array, work: int = 0) -> mx.array:
        """Start computing `x`. `work`: values that its computation holds, if more than those of `x`."""
        kernels.dispatch(x)
        self.started.append((x, max(x.size, work)))
        self.values += self.started[-1][1]
        # Without a limit, all strips would be in memory at once. If every strip was waited for, a GPU would be idle between
        # two. Far from the image's own resolution an activation is one small strip, so that a GPU is handed many layers
        # ahead.
        newest, most = (1, IN_FLIGHT * strip_bytes() // ITEM) if kernels.compiles() else (0, 0)  # not waited for
        while len(self.started) > newest and self.values > most:
            oldest, values = self.started.popleft()
            self.values -= values
            mx.eval(oldest)
        return x

    def clear(self) -> None:
        self.started.clear()
        self.values = 0


class Rows:
    """An activation (B, H, W, C) as strips, from top to bottom."""

    def __init__(self, strips: list[mx.array]) -> None:
        self.strips: list[mx.array | None] = list(strips)
        self.starts = [0]
        for strip in strips:
            self.starts.append(self.starts[-1] + strip.shape[1])
        self.width, self.channels = strips[0].shape[2:]

    @property
    def height(self) -> int:
        return self.starts[-1]

    def take(self, first: int, last: int) -> mx.array:
        """Rows `first` to `last` (exclusive) as one array; those that do not exist are left out."""
        first, last = max(first, 0), min(last, self.height)
        parts = []
        for at, strip in enumerate(self.strips):
            start, end = max(first, self.starts[at]), min(last, self.starts[at + 1])
            if start >= end:
                continue
            assert strip is not None, "a strip was freed too early"
            whole = (start, end) == (self.starts[at], self.starts[at + 1])
            parts.append(strip if whole else strip[:, start - self.starts[at] : end - self.starts[at]])
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    def free_before(self, row: int) -> None:
        """Free the strips whose rows all lie before `row`."""
        for at, end in enumerate(self.starts[1:]):
            if end <= row:
                self.strips[at] = None

    def present(self) -> Iterator[mx.array]:
        for strip in self.strips:
            assert strip is not None, "a strip was freed too early"
            yield strip


def strip_bytes(exact: bool | None = None) -> int:
    """Most bytes of a strip in float32. `exact` products: None is `kernels.exact()`."""
    exact = kernels.exact() if exact is None else exact
    return GPU_STRIP_BYTES if kernels.compiles() and not exact else STRIP_BYTES


def strip_rows(height: int, width: int, inputs: int, outputs: int, kernel: int = 3, exact: bool | None = None) -> int:
    """Output rows that a convolution computes at once, within `strip_bytes` and `kernels.LIMIT`, at least 1."""
    by_bytes = strip_bytes(exact) // (ITEM * width * max(inputs, outputs))
    by_operations = kernels.LIMIT // kernels.product_flop(width, kernel * kernel * inputs, outputs)
    most = max(1, int(min(by_bytes, by_operations)))
    # Strips of about equal height.
    return -(-height // -(-height // most))


def windows(height: int, rows: int) -> Iterator[tuple[int, int]]:
    """(first, last), last exclusive, of consecutive windows of at most `rows` rows."""
    for first in range(0, height, rows):
        yield first, min(first + rows, height)


def group_statistics(x: Rows, groups: int, eps: float, start: Callable[[mx.array, int], mx.array]) -> tuple[mx.array, mx.array]:
    """(mean, 1 / standard deviation) of a group norm, float32 (B, 1, 1, C)."""
    count = x.height * x.width * x.channels // groups
    squares = kernels.compiled(_squares)
    # `start`, of a StripQueue, waits for earlier strips: only a few are in memory at once.
    total_BC = sum((start(_sum(strip), strip.size) for strip in x.present()), start=mx.array(0.0))
    mean_BG = total_BC.reshape(total_BC.shape[0], groups, -1).sum(-1) / count
    mean_B11C = mx.repeat(mean_BG, x.channels // groups, axis=-1)[:, None, None]
    square_BC = sum((start(squares(strip, mean_B11C), strip.size) for strip in x.present()), start=mx.array(0.0))
    var_BG = square_BC.reshape(square_BC.shape[0], groups, -1).sum(-1) / count
    scale_BG = mx.rsqrt(var_BG + eps)
    return mean_B11C, mx.repeat(scale_BG, x.channels // groups, axis=-1)[:, None, None]


def _sum(x_BRWC: mx.array) -> mx.array:
    # Columns first: one long sum of float32 values would lose digits.
    return x_BRWC.astype(mx.float32).sum(2).sum(1)


def _squares(x_BRWC: mx.array, mean_B11C: mx.array) -> mx.array:
    return mx.square(x_BRWC.astype(mx.float32) - mean_B11C).sum(2).sum(1)
