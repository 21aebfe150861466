"""Loads a fast BLAS before MLX's CPU backend on Linux.

MLX's CPU wheel for Linux calls cblas in the library that the process loaded first; the reference build that comes with it
multiplies at about 7 GFLOP/s. A library that is loaded globally before `mlx.core` takes precedence: 200 GFLOP/s and more on
two cores, for float32 only. macOS has Accelerate, so nothing is loaded there. Loading takes about 15 ms of CPU time.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

SET_THREADS = "MKL_Set_Num_Threads", "openblas_set_num_threads"  # functions of MKL and of OpenBLAS that take one int


def candidates() -> Iterator[str]:
    """Yield the file names or paths of the BLAS libraries to try, best first. MKL from PyPI comes before the system's
    OpenBLAS.
    """
    yield from sorted(str(path) for path in (Path(sys.prefix) / "lib").glob("libmkl_rt.so*"))
    yield from filter(None, [ctypes.util.find_library("openblas")])  # starts a process, so it is not asked first
    yield "libopenblas.so.0"


def threads() -> int:
    """Return how many threads this process may compute with. It is the environment variable `OMP_NUM_THREADS`, or the number of
    CPU cores that the process may use.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    return len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1


def set_threads(count: int) -> None:
    """Let the products of the loaded BLAS library use `count` threads from now on. Nothing happens if `load` found no library,
    or if the library has no function for it.
    """
    library = load()
    if not library:
        return
    opened = ctypes.CDLL(library)
    for name in SET_THREADS:
        if hasattr(opened, name):
            getattr(opened, name)(count)
            return


@functools.cache
def load() -> str:
    """Load a BLAS library into this process and return its name. The libraries of `candidates` are tried in order, and
    the first one that loads is used. Return "" if none loads, or if the system is not Linux. Call this function before
    `mlx.core` is imported. Later calls load nothing and return the same name.
    """
    if not sys.platform.startswith("linux"):
        return ""
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # else MKL's idle threads spin on the cores that compute everything else
    for name in candidates():
        try:
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    return ""
