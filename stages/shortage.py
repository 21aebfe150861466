"""When the device has no memory left: how MLX says so, and what is freed before another try."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Metal: "[METAL] Command buffer execution failed: Insufficient Memory (...OutOfMemory)", "[metal::malloc] Resource limit (N)
# exceeded.", "[metal::malloc] Attempting to allocate N bytes which is greater than ...". CUDA: "cudaMallocAsync(...) failed: out
# of memory", "... failed: CUBLAS_STATUS_ALLOC_FAILED". Both: "[malloc] Unable to allocate N bytes."
TEXTS = (
    r"insufficient memory|outofmemory|out of memory|alloc_failed|resource limit|unable to allocate"
    r"|\b(malloc|alloc\w*)\b.*\b(fail|bytes|unable|memory)"
)


def is_shortage(error: RuntimeError) -> bool:
    return re.search(TEXTS, str(error), re.IGNORECASE) is not None


def held_bytes() -> int:
    """What MLX holds, its cache included."""
    import mlx.core as mx

    return mx.get_active_memory() + mx.get_cache_memory()


def free_memory() -> None:
    """Outside the `except` block: the error's traceback holds the arrays of what failed, and on a CPU its stream."""
    import mlx.core as mx

    gc.collect()
    mx.synchronize()  # work in flight keeps its arrays; CUDA gives freed memory back to others only then
    mx.clear_cache()
    mx.synchronize()


_granted: ContextVar[int | None] = ContextVar("granted", default=None)


@contextmanager
def budget(granted: int | None) -> Iterator[None]:
    """Within the block, `memory_budget` gives at most what MLX was granted before an allocation failed; None: no limit."""
    token = _granted.set(granted)
    try:
        yield
    finally:
        _granted.reset(token)


def granted_bytes() -> int | None:
    return _granted.get()
