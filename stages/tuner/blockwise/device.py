"""What the device can do and how much it may hold: memory budget, limits on work in flight, whether to compile."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from stages.kernels import compiles as compiles
from stages.kernels import dispatch as dispatch
from stages.kernels import limited
from stages.tuner.blockwise.cores import cores

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
    """Return the bytes of memory that MLX may use. On a Mac, this is the working set size that Metal recommends. On
    CUDA, it is the total memory of the GPU. Otherwise, it is the memory of the machine.
    """
    info: Mapping[str, Any] = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if key in info:
            return int(info[key])
    return physical_bytes()


def memory_budget(limit_gb: float | None = None) -> int:
    """Return how many bytes of memory a stage may take. `limit_gb` is a limit from the settings, in gigabytes (10^9
    bytes). The result is this limit in bytes. If `limit_gb` is None, the result is 85 % of `device_bytes()`.

    If `limit_gb` is None, three more rules hold on a Mac. The result is at most the machine's memory less 6 GB. It is
    at most the memory that was free at the first call of `free_bytes`. It is at least 1 GB.
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
    """Return a context manager that limits the memory of MLX to `limit` bytes. At this limit, MLX waits for running
    operations before it starts more. MLX's cache of freed memory gets the same limit. On exit, the previous limits are
    restored. If `limit` is None, nothing is changed.

    On Metal, up to `limit` bytes are also wired: macOS does not page them to disk. They stay wired after the exit,
    because wiring them again in every step would take time.

    MLX starts operations before earlier ones have finished. The limit bounds the memory of this work. Results do not
    change.
    """
    if limit is None:
        yield
        return
    before, cache = mx.set_memory_limit(limit), mx.set_cache_limit(limit)
    if limited():
        mx.set_wired_limit(min(limit, device_bytes()))
    try:
        yield
    finally:
        mx.set_memory_limit(before)
        mx.set_cache_limit(cache)


def blocks_in_flight() -> int:
    """Return how many blocks of a model have arrays in memory at the same time: 2 on a GPU, 1 on a CPU.

    Each block is handed to the device while the previous block is computed. A GPU frees arrays only when a batch of operations
    ends. A CPU frees each array after its last use.
    """
    return 1 if mx.default_device() == mx.cpu else IN_FLIGHT


def gathers_large_command_buffers() -> bool:
    """Return True if MLX submits operations to the default device in large batches. MLX does this on CUDA GPUs with the
    compute capability 8.0, 9.0, 10.0 or 12.0. On these GPUs, the operations of one batch read up to 400 or 1000 MB,
    depending on the GPU. On every other device, the result is False.

    Large batches take memory, because all arrays of a batch are alive until it is done. `configure_scheduler` makes
    these batches smaller.
    """
    if not mx.cuda.is_available() or mx.default_device() != mx.gpu:
        return False
    info: Mapping[str, Any] = mx.device_info()
    return (info.get("compute_capability_major"), info.get("compute_capability_minor")) in LARGE_BUFFERS


def configure_scheduler() -> None:
    """Set how MLX orders operations on this device, for less memory and time. Call it before the first MLX operation of the
    process. It sets environment variables, unless the user has set them. MLX reads each of them only once.

    On the GPUs for which `gathers_large_command_buffers` returns True, the variable is `MLX_MAX_MB_PER_BUFFER`. MLX then
    submits operations in smaller batches, each reading about 200 MB. All arrays of a batch are alive until it is done.
    data/bench.md compares the peaks.

    On a CPU with several cores, the variable is `MLX_BFS_MAX_WIDTH`. MLX then takes operations from all parts of a graph in
    turn. By default, it computes a graph with many results depth first, and cores wait for each other.
    """
    if gathers_large_command_buffers():
        os.environ.setdefault(BUFFER_VARIABLE, BUFFER_MB)
    if mx.default_device() == mx.cpu and len(cores().streams) > 1:
        os.environ.setdefault(WIDTH_VARIABLE, WIDTH)


def configure_convolutions() -> None:
    """Set how MLX starts the operations of an autoencoder on a CUDA GPU, for less time. Call it before the first MLX
    operation of the process. It sets the environment variables of `CONVOLUTIONS`, unless the user has set them. MLX reads each of
    them only once. On other devices, nothing is set.

    By default, MLX gathers operations in CUDA graphs. A graph with a convolution of cuDNN is often built anew each time, which
    takes the CPU longer than the GPU computes. Without graphs, arrays are freed after every third operation.
    """
    if mx.cuda.is_available() and mx.default_device() == mx.gpu:
        for name, value in CONVOLUTIONS.items():
            os.environ.setdefault(name, value)


def compute_exactly() -> None:
    """Make MLX compute float32 products and convolutions in full float32. Call it before the first product of the
    process. MLX's defaults round the inputs of products to TF32 on some GPUs. On Metal, they also compute convolutions
    with Winograd's method, which loses digits.

    It sets the environment variables of `EXACT`, unless the user has set them. MLX reads each of them only once.
    """
    for name, value in EXACT.items():
        os.environ.setdefault(name, value)
