"""The memory of this process as the machine counts it: on CUDA the driver's figure for the GPU less what was in use before this
process, on macOS phys_footprint (Activity Monitor's "Memory"), elsewhere resident memory.

MLX counts its arrays alone. The machine also counts what they live in and beside: on a GPU the context, kernels, graphs, and what
the allocator keeps; else the program and its libraries.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import struct
import sys
from pathlib import Path
from typing import Any

# proc_pid_rusage(pid, RUSAGE_INFO_V4): 16 bytes, then 35 uint64 (sys/resource.h of macOS)
RUSAGE_INFO_V4, RUSAGE_V4 = 4, "16x35Q"
LARGEST = 28  # ri_lifetime_max_phys_footprint
# CUmemPool_attribute: memory that the pool holds of the device's, now and at most, and what of it arrays took at most
RESERVED, MOST_RESERVED, MOST_USED = 5, 6, 8


def peak() -> int:
    """Bytes, the most since the process started."""
    if sys.platform == "darwin":
        return _peak_on_macos()
    found = gpu()
    return found.peak() if found and found.used_here() else peak_resident()


def _peak_on_macos() -> int:
    buffer = ctypes.create_string_buffer(struct.calcsize(RUSAGE_V4))
    if ctypes.CDLL(None).proc_pid_rusage(os.getpid(), RUSAGE_INFO_V4, buffer):
        return peak_resident()
    return int(struct.unpack(RUSAGE_V4, buffer.raw)[LARGEST])


def peak_resident() -> int:
    """Of the program and of arrays in the memory of the CPU, the most so far."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS only
    # On Linux, getrusage gives the memory of the parent process if that was larger when it started this one.
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


class _Used(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Gpu:
    """The first CUDA GPU of this process; OSError without one. `before`: bytes in use when the object was made."""

    def __init__(self) -> None:
        self.cuda, self.nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
        name, self.handle = ctypes.create_string_buffer(32), ctypes.c_void_p()
        # None of these makes a context, which would take half a gigabyte.
        _do(self.cuda.cuInit, 0)
        _do(self.cuda.cuDeviceGetPCIBusId, name, 32, 0)
        _do(self.nvml.nvmlInit_v2)
        _do(self.nvml.nvmlDeviceGetHandleByPciBusId_v2, name, ctypes.byref(self.handle))
        self.before = self.used()

    def used(self) -> int:
        """Bytes of the device in use, by all processes."""
        found = _Used()
        _do(self.nvml.nvmlDeviceGetMemoryInfo, self.handle, ctypes.byref(found))
        return int(found.used)

    def pool(self, attribute: int) -> int:
        """Of the pool that cudaMallocAsync takes arrays from, bytes."""
        pool, found = ctypes.c_void_p(), ctypes.c_ulonglong()
        _do(self.cuda.cuDeviceGetDefaultMemPool, ctypes.byref(pool), 0)
        _do(self.cuda.cuMemPoolGetAttribute, pool, attribute, ctypes.byref(found))
        return int(found.value)

    def used_here(self) -> bool:
        """Whether this process computes on it."""
        flags, active = ctypes.c_uint(), ctypes.c_int()
        _do(self.cuda.cuDevicePrimaryCtxGetState, 0, ctypes.byref(flags), ctypes.byref(active))
        return bool(active.value)

    def now(self) -> int:
        return self.used() - self.before

    def peak(self) -> int:
        # Only the pool gives memory back, and it knows how much it had at most; contexts, kernels and graphs grow.
        return self.now() - self.pool(RESERVED) + self.pool(MOST_RESERVED)


def _do(call: Any, *given: Any) -> None:
    if code := call(*given):
        raise OSError(f"{call.__name__} failed with code {code}")


@functools.cache
def gpu() -> Gpu | None:
    """The first call decides what was in use before: it must come before MLX or PyTorch is imported."""
    try:
        return Gpu()
    except (OSError, AttributeError):  # no driver, no GPU, or a driver without these functions
        return None
