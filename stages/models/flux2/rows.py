"""Images and activations as strips of rows, so that a convolution of a large image needs memory for one strip at a time.

The number of rows of a strip follows from shapes and the kind of device: no strip of a convolution's input or output takes
more than `strip_bytes()`, and no kernel more operations than `kernels.LIMIT`. Small images are one strip. A convolution reads
the rows beside its strip too, and statistics of a normalisation are sums over all strips, so results are equal up to rounding.

B batch, R rows of a strip, W width, C channels, G groups.
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
    """A queue of strips that the device computes. A strip is some consecutive rows of an image. On a GPU, the unfinished
    strips together take at most as much memory as two strips of full size (`strip_bytes`). A further call of `start`
    waits for the oldest ones. On a CPU, every call waits until its strip is computed.

    Without a limit, all strips of an image would be in memory at once. If every strip was waited for, a GPU would be
    idle between two strips. Far from the image's own resolution an activation is one small strip, so that a GPU is handed
    many layers ahead.
    """

    def __init__(self) -> None:
        self.started: deque[tuple[mx.array, int]] = deque()  # with the values that its computation holds
        self.values = 0

    def start(self, x: mx.array, work: int = 0) -> mx.array:
        """Start the computation of the lazy array `x`, and return `x`. `work` is how many array values the computation
        holds in memory, if these are more than those of `x`. On a GPU, `x` may not be computed yet.
        """
        kernels.dispatch(x)
        self.started.append((x, max(x.size, work)))
        self.values += self.started[-1][1]
        newest, most = (1, IN_FLIGHT * strip_bytes() // ITEM) if kernels.compiles() else (0, 0)  # not waited for
        while len(self.started) > newest and self.values > most:
            oldest, values = self.started.popleft()
            self.values -= values
            mx.eval(oldest)
        return x

    def clear(self) -> None:
        """Remove all strips from the queue, so that the queue does not keep them in memory. A strip is an array of some
        consecutive rows of an image.
        """
        self.started.clear()
        self.values = 0


class Rows:
    """An activation `(batch, height, width, channels)`, stored as a list of strips. A strip is an array of some
    consecutive rows, `(batch, rows, width, channels)`. `strips` lists the strips from top to bottom. The method `take`
    returns some rows as one array. The method `free_before(row)` frees all strips that lie completely above the row
    with the index `row`.
    """

    def __init__(self, strips: list[mx.array]) -> None:
        self.strips: list[mx.array | None] = list(strips)
        self.starts = [0]
        for strip in strips:
            self.starts.append(self.starts[-1] + strip.shape[1])
        self.width, self.channels = strips[0].shape[2:]

    @property
    def height(self) -> int:
        """The height of the activation: the number of rows of all strips together."""
        return self.starts[-1]

    def take(self, first: int, last: int) -> mx.array:
        """Return some rows of the activation as one array `(batch, rows, width, channels)`. The rows are those from
        index `first` up to, but not including, `last`. Indices of rows that do not exist are ignored: `take(-1, 3)`
        returns the rows 0, 1 and 2. Raises AssertionError if `free_before` has freed a strip that holds one of the
        rows.
        """
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
        """Free every strip of the activation whose rows all lie before the row with the index `row`. Rows count from 0
        at the top.
        """
        for at, end in enumerate(self.starts[1:]):
            if end <= row:
                self.strips[at] = None

    def present(self) -> Iterator[mx.array]:
        """Yield the strips of the activation from top to bottom. A strip is an array `(batch, rows, width, channels)`.
        Raises AssertionError if a strip was already freed.
        """
        for strip in self.strips:
            assert strip is not None, "a strip was freed too early"
            yield strip


def strip_bytes(exact: bool | None = None) -> int:
    """Return the largest allowed size of one strip, in bytes. A strip is some consecutive rows of an image. A value
    counts as 4 bytes, whatever its dtype. On a CPU, the size is `STRIP_BYTES`. On a GPU, it is `GPU_STRIP_BYTES`, which
    is larger. With exact float32 products, it is `STRIP_BYTES` on a GPU too. `exact` says whether products are exact.
    If it is None, `kernels.exact()` decides.
    """
    exact = kernels.exact() if exact is None else exact
    return GPU_STRIP_BYTES if kernels.compiles() and not exact else STRIP_BYTES


def strip_rows(height: int, width: int, inputs: int, outputs: int, kernel: int = 3, exact: bool | None = None) -> int:
    """Return how many output rows a convolution computes at once, at least 1. Two limits apply: the size of a strip
    (`strip_bytes`), and the floating-point operations of one device kernel (`kernels.LIMIT`). `height` and `width` are
    those of the output. `inputs` and `outputs` are the numbers of channels. `kernel` is the side of the convolution's
    window, such as 3. `exact` says whether float32 products are exact. If it is None, `kernels.exact()` decides.
    """
    by_bytes = strip_bytes(exact) // (ITEM * width * max(inputs, outputs))
    by_operations = kernels.LIMIT // kernels.product_flop(width, kernel * kernel * inputs, outputs)
    most = max(1, int(min(by_bytes, by_operations)))
    return -(-height // -(-height // most))


def windows(height: int, rows: int) -> Iterator[tuple[int, int]]:
    """Divide `height` rows into consecutive windows of at most `rows` rows, and yield each as `(first, last)`. `first`
    is the index of the window's first row. `last` is the index after its last row.
    """
    for first in range(0, height, rows):
        yield first, min(first + rows, height)


def group_statistics(x: Rows, groups: int, eps: float, start: Callable[[mx.array, int], mx.array]) -> tuple[mx.array, mx.array]:
    """Return `(mean, scale)` of a group normalisation. The scale is 1 / standard deviation. Both are float32 arrays
    `(batch, 1, 1, channels)`. `x` is the activation, a `Rows` object: an array `(batch, height, width, channels)` in
    strips of rows. The channels form `groups` groups of equally many neighbouring channels. The mean and variance are
    taken over all values of a group in one image, and all channels of the group get the same result. `eps` is added to
    the variance. `start(array, work)` starts the computation of a lazy array, which holds `work` values, and returns
    this array.

    As `start`, the caller passes the method `start` of a `StripQueue`. This method is called with the sums of each
    strip. It waits for earlier strips, so that only a few strips are in memory at once. Sums go over columns first: one
    long sum of float32 values would lose digits.
    """
    count = x.height * x.width * x.channels // groups
    squares = kernels.compiled(_squares)
    total_BC = sum((start(_sum(strip), strip.size) for strip in x.present()), start=mx.array(0.0))
    mean_BG = total_BC.reshape(total_BC.shape[0], groups, -1).sum(-1) / count
    mean_B11C = mx.repeat(mean_BG, x.channels // groups, axis=-1)[:, None, None]
    square_BC = sum((start(squares(strip, mean_B11C), strip.size) for strip in x.present()), start=mx.array(0.0))
    var_BG = square_BC.reshape(square_BC.shape[0], groups, -1).sum(-1) / count
    scale_BG = mx.rsqrt(var_BG + eps)
    return mean_B11C, mx.repeat(scale_BG, x.channels // groups, axis=-1)[:, None, None]


def _sum(x_BRWC: mx.array) -> mx.array:
    return x_BRWC.astype(mx.float32).sum(2).sum(1)


def _squares(x_BRWC: mx.array, mean_B11C: mx.array) -> mx.array:
    return mx.square(x_BRWC.astype(mx.float32) - mean_B11C).sum(2).sum(1)
