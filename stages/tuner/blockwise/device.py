"""What the device can do and how much it may hold: memory budget, limits on work in flight, whether to compile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

GB = 1e9
HEADROOM = 0.15  # share of the device's memory left for the system, MLX's cache and copies
BUFFER_VARIABLE = "MLX_MAX_MB_PER_BUFFER"  # MLX: MB that operations read before MLX submits them to the device
BUFFER_MB = "200"
LARGE_BUFFERS = ((8, 0), (9, 0), (10, 0), (12, 0))  # CUDA compute capabilities for which MLX's own limit is 400 or 1000 MB

dispatch: Callable[..., None] = mx.async_eval  # start computing these arrays without waiting; MLX leaves it untyped


def compiles() -> bool:
    """Whether functions are compiled with mx.compile on the default device: yes on a GPU, no on a CPU, where it runs a C++
    compiler for minutes.
    """
    return mx.default_device() != mx.cpu


def device_bytes() -> int:
    """Return the bytes that MLX may use: Metal's recommended working set, a GPU's own memory, or the machine's memory."""
    info: Mapping[str, Any] = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if key in info:
            return int(info[key])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_budget(limit_gb: float | None = None) -> int:
    """Return the bytes that training may take: `limit_gb` (1 GB is 10^9 bytes) if given, else the device's memory less 15 %."""
    return int(limit_gb * GB if limit_gb else device_bytes() * (1 - HEADROOM))


@contextmanager
def live_memory_limit(limit: int | None) -> Iterator[None]:
    """Context manager: MLX starts operations ahead of the device only while live memory is below `limit` bytes; None keeps
    MLX's own limit. Above it, the next operation waits until running work has freed memory. Results do not change.
    """
    if limit is None:
        yield
        return
    before = mx.set_memory_limit(limit)
    try:
        yield
    finally:
        mx.set_memory_limit(before)


def gathers_large_command_buffers() -> bool:
    """Whether the default device is a CUDA GPU on which MLX collects operations that read more than 200 MB before it submits
    them.
    """
    if not mx.cuda.is_available() or mx.default_device() != mx.gpu:
        return False
    info: Mapping[str, Any] = mx.device_info()
    return (info.get("compute_capability_major"), info.get("compute_capability_minor")) in LARGE_BUFFERS


def limit_command_buffers() -> None:
    """On large CUDA GPUs, make MLX submit work after operations that read 200 MB, unless the user has set
    MLX_MAX_MB_PER_BUFFER. Call it before the process creates its first MLX operation: MLX reads that variable once, then.

    All arrays of a command buffer are alive until it is done; data/bench.md compares the peaks.
    """
    if gathers_large_command_buffers():
        os.environ.setdefault(BUFFER_VARIABLE, BUFFER_MB)
