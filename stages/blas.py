"""Loads a fast BLAS before MLX's CPU backend on Linux.

MLX's CPU wheel for Linux calls cblas in the library that the process loaded first; the reference build that comes with it
multiplies at about 7 GFLOP/s. A library that is loaded globally before `mlx.core` takes precedence: 200 GFLOP/s and more on
two cores, for float32 only. macOS has Accelerate, so nothing is loaded there. Loading takes about 15 ms of CPU time.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def candidates() -> Iterator[str]:
    """Yield the file names or paths of the BLAS libraries to try, best first. MKL from PyPI comes before the system's
    OpenBLAS.
    """
    yield from sorted(str(path) for path in (Path(sys.prefix) / "lib").glob("libmkl_rt.so*"))
    yield from filter(None, [ctypes.util.find_library("openblas")])  # starts a process, so it is not asked first
    yield "libopenblas.so.0"


def load() -> str:
    """Load a BLAS library into this process and return its name. The libraries of `candidates` are tried in order, and
    the first one that loads is used. Return "" if none loads, or if the system is not Linux. Call this function before
    `mlx.core` is imported.
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
