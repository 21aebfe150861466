"""What the device can do and how much it may hold: memory budget, limits on work in flight, whether to compile."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from stages.kernels import compiles as compiles

GB = 1e9
HEADROOM = 0.15  # share of the device's memory left for the system, MLX's cache and copies
RESERVED = 6_000_000_000  # bytes of a Mac's memory that are left to macOS and other programs
LEAST = 1_000_000_000  # bytes: the budget never falls below
FREE_PAGES = r"^Pages (?:free|inactive|speculative|purgeable):\s+(\d+)"  # lines of `vm_stat`
BUFFER_VARIABLE = "MLX_MAX_MB_PER_BUFFER"  # MLX: MB that operations read before MLX submits them to the device
BUFFER_MB = "200"
LARGE_BUFFERS = ((8, 0), (9, 0), (10, 0), (12, 0))  # CUDA compute capabilities for which MLX's own limit is 400 or 1000 MB

dispatch: Callable[..., None] = mx.async_eval  # start computing these arrays without waiting; MLX leaves it untyped


def device_bytes() -> int:
    """Return the bytes of memory that MLX may use. On Metal this is the recommended working set. On CUDA it is the memory of the
    GPU. Otherwise it is the memory of the machine.
    """
    info: Mapping[str, Any] = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if key in info:
            return int(info[key])
    return physical_bytes()


def memory_budget(limit_gb: float | None = None) -> int:
    """Return the bytes that a stage may take. `limit_gb` is in gigabytes (10^9 bytes). If it is None, the result is 85 % of the
    device's memory. On a Mac, the result is at most the memory less 6 GB, and at most what is free now.
    """
    if limit_gb is not None:
        return int(limit_gb * GB)
    found = int(device_bytes() * (1 - HEADROOM))
    system: str = sys.platform  # a plain name, as mypy knows the platform that it runs on
    if system != "darwin":
        return found
    return max(LEAST, min(found, physical_bytes() - RESERVED, free_bytes() or found))


def physical_bytes() -> int:
    """Return the bytes of memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def free_bytes() -> int | None:
    """Return the free memory of a Mac, in bytes. Memory that the system could free at once is included. The value is
    measured at the first call and does not change afterwards. Return None if `vm_stat` does not give it.

    Without enough free memory, a Mac pages to disk instead of failing. Training is then many times slower.
    """
    try:
        done = subprocess.run(["vm_stat"], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    size = re.search(r"page size of (\d+) bytes", done.stdout)
    pages = [int(count) for count in re.findall(FREE_PAGES, done.stdout, re.MULTILINE)]
    return int(size[1]) * sum(pages) if size and pages else None


@contextmanager
def live_memory_limit(limit: int | None) -> Iterator[None]:
    """Return a context manager that limits how far MLX runs ahead of the device. MLX starts operations before earlier
    ones have finished. While `limit` bytes or more are in use, MLX waits until running work frees memory. If `limit` is
    None, MLX's own limit applies. MLX's cache of freed memory is limited to `limit` too. Results do not change. At the
    end, the previous limits are restored.
    """
    if limit is None:
        yield
        return
    before, cache = mx.set_memory_limit(limit), mx.set_cache_limit(limit)
    try:
        yield
    finally:
        mx.set_memory_limit(before)
        mx.set_cache_limit(cache)


def gathers_large_command_buffers() -> bool:
    """Return True if the default device is a large CUDA GPU. On such a GPU, MLX collects operations that read 400 or 1000 MB
    before it submits them. The usual size is 200 MB.
    """
    if not mx.cuda.is_available() or mx.default_device() != mx.gpu:
        return False
    info: Mapping[str, Any] = mx.device_info()
    return (info.get("compute_capability_major"), info.get("compute_capability_minor")) in LARGE_BUFFERS


def limit_command_buffers() -> None:
    """Make MLX submit work to a large CUDA GPU in smaller command buffers, to lower peak memory. A command buffer is a
    batch of operations. This function limits the data that the operations of one buffer read to 200 MB. It sets the
    environment variable `MLX_MAX_MB_PER_BUFFER`, unless the user has set it. Call it before the first MLX operation of
    the process, because MLX reads the variable only once. On other devices it does nothing.

    All arrays of a command buffer are alive until it is done. data/bench.md compares the peaks.
    """
    if gathers_large_command_buffers():
        os.environ.setdefault(BUFFER_VARIABLE, BUFFER_MB)
