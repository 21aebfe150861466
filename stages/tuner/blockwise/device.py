"""What the device can do and how much it may hold: memory budget, limits on work in flight, how MLX schedules."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from stages import blas
from stages.kernels import limited
from stages.shortage import granted_bytes

GB = 1e9
HEADROOM = 0.15  # share of the device's memory left for the system, MLX's cache and copies
RESERVED = 6_000_000_000  # bytes of a Mac's memory that are left to macOS and other programs
LEAST = 1_000_000_000  # bytes: the budget never falls below
FREE_PAGES = r"^Pages (?:free|inactive|speculative|purgeable):\s+(\d+)"  # lines of `vm_stat`
BUFFER_VARIABLE = "MLX_MAX_MB_PER_BUFFER"  # MLX: MB that operations read before MLX submits them to the device
BUFFER_MB = "200"
WIDTH_VARIABLE = "MLX_BFS_MAX_WIDTH"  # MLX: how many branches of a graph are followed in turn; more are computed depth first
WIDTH = "100000"  # more than any graph has
CONVOLUTIONS = {"MLX_USE_CUDA_GRAPHS": "0", "MLX_MAX_OPS_PER_BUFFER": "3"}  # MLX on CUDA: start each operation by itself
EXACT = {"MLX_ENABLE_TF32": "0", "MLX_CONV_WINOGRAD": "0"}  # MLX: float32 products in full, convolutions without Winograd
LARGE_BUFFERS = ((8, 0), (9, 0), (10, 0), (12, 0))  # CUDA compute capabilities for which MLX's own limit is 400 or 1000 MB

IN_FLIGHT = 2  # blocks whose arrays a GPU holds at once: one is computed while the next is handed over


def device_bytes() -> int:
    """Memory that MLX may use: Metal's recommended working set, a CUDA GPU's total, else the machine's."""
    info: Mapping[str, Any] = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if key in info:
            return int(info[key])
    return physical_bytes()


def memory_budget(limit_gb: float | None = None) -> int:
    """Bytes that a stage may take: the user's limit, else 85 % of the device's, on a Mac less if the machine has less free.

    Less if an allocation has failed.
    """
    if (granted := granted_bytes()) is not None:
        return granted if limit_gb is None else min(granted, int(limit_gb * GB))
    if limit_gb is not None:
        return int(limit_gb * GB)
    found = int(device_bytes() * (1 - HEADROOM))
    system: str = sys.platform  # a plain name, as mypy knows the platform that it runs on
    if system != "darwin":
        return found
    return max(LEAST, min(found, physical_bytes() - RESERVED, free_bytes() or found))


def physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def free_bytes() -> int | None:
    """Bytes that macOS has free or could free at once, measured at the first call. None if `vm_stat` does not say."""
    # Without enough free memory, a Mac pages to disk instead of failing, and training is many times slower.
    try:
        done = subprocess.run(["vm_stat"], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    size = re.search(r"page size of (\d+) bytes", done.stdout)
    pages = [int(count) for count in re.findall(FREE_PAGES, done.stdout, re.MULTILINE)]
    return int(size[1]) * sum(pages) if size and pages else None


@contextmanager
def live_memory_limit(limit: int | None) -> Iterator[None]:
    """Limits what MLX allocates, and its cache, to `limit` bytes; results do not change."""
    if limit is None:
        yield
        return
    # MLX starts operations before earlier ones have finished; at the limit it waits for them first.
    before, cache = mx.set_memory_limit(limit), mx.set_cache_limit(limit)
    if limited():
        # Wired memory is not paged to disk. It stays wired after the exit: wiring it again would cost time in every step.
        mx.set_wired_limit(min(limit, device_bytes()))
    try:
        yield
    finally:
        mx.set_memory_limit(before)
        mx.set_cache_limit(cache)


def blocks_in_flight() -> int:
    # A GPU frees arrays only when a batch of operations ends, and the next block is handed over while one is computed. A CPU
    # frees each array after its last use.
    return 1 if mx.default_device() == mx.cpu else IN_FLIGHT


def gathers_large_command_buffers() -> bool:
    """Whether MLX on this GPU submits operations in batches that read 400 or 1000 MB; all arrays of a batch stay alive."""
    if not mx.cuda.is_available() or mx.default_device() != mx.gpu:
        return False
    info: Mapping[str, Any] = mx.device_info()
    return (info.get("compute_capability_major"), info.get("compute_capability_minor")) in LARGE_BUFFERS


def limit_command_buffers() -> None:
    """Before the first MLX operation."""
    # Smaller batches of operations free their arrays earlier: data/docs/bench.md compares the peaks.
    if gathers_large_command_buffers():
        os.environ.setdefault(BUFFER_VARIABLE, BUFFER_MB)


def configure_scheduler() -> None:
    """Sets MLX's environment variables, unless the user did, for less memory and time. Before the first MLX operation."""
    limit_command_buffers()
    # By default, MLX computes a graph with many results depth first, and cores wait for each other.
    if mx.default_device() == mx.cpu and len(cores().streams) > 1:
        os.environ.setdefault(WIDTH_VARIABLE, WIDTH)


def configure_convolutions() -> None:
    """Sets MLX's environment variables, unless the user did, for an autoencoder on CUDA. Before the first MLX operation."""
    # By default, MLX gathers operations in CUDA graphs. One with a cuDNN convolution is often built anew each time, which
    # takes the CPU longer than the GPU computes. Without graphs, arrays are freed after every third operation.
    if mx.cuda.is_available() and mx.default_device() == mx.gpu:
        for name, value in CONVOLUTIONS.items():
            os.environ.setdefault(name, value)


def compute_exactly() -> None:
    """Full float32 in products and convolutions, unless the user's environment differs. Before the first MLX operation."""
    # MLX's defaults round the inputs of products to TF32 on some GPUs; Winograd convolutions on Metal lose digits.
    for name, value in EXACT.items():
        os.environ.setdefault(name, value)


@dataclass
class Cores:
    streams: Sequence[mx.ThreadLocalStream]  # one per core; each Python thread has a queue of its own behind an entry
    parts: int = 1  # streams in use

    def share(self, parts: int) -> Sequence[mx.ThreadLocalStream]:
        """The first `parts` streams. A product of one part then uses 1 / `parts` of the cores, rounded down, at least one."""
        if parts != self.parts:
            # Products still running must keep their number of threads: their rounding depends on it.
            mx.synchronize(mx.cpu)
            for stream in self.streams:
                mx.synchronize(stream)
            blas.set_threads(max(1, len(self.streams) // parts))
            self.parts = parts
        return self.streams[:parts]


@functools.cache
def cores() -> Cores:
    """The cores that this process may use: OMP_NUM_THREADS or those of the machine, read once."""
    return Cores([mx.new_thread_local_stream(mx.cpu) for _ in range(blas.threads())])
