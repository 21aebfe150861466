"""Loads a fast BLAS before MLX's CPU backend on Linux."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

SET_THREADS = "MKL_Set_Num_Threads", "openblas_set_num_threads"  # functions of MKL and of OpenBLAS that take one int

SET_NUMPY = "scipy_openblas_set_num_threads64_"


def candidates() -> Iterator[str]:
    """File names or paths of BLAS libraries, best first."""
    # MKL from PyPI.
    yield from sorted(str(path) for path in (Path(sys.prefix) / "lib").glob("libmkl_rt.so*"))
    yield from filter(None, [ctypes.util.find_library("openblas")])  # starts a process, so it is not asked first
    yield "libopenblas.so.0"


def threads() -> int:
    """OMP_NUM_THREADS, or the cores that the process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    return len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1


def set_threads(count: int) -> None:
    library = load()
    if not library:
        return
    opened = ctypes.CDLL(library)
    for name in SET_THREADS:
        if hasattr(opened, name):
            getattr(opened, name)(count)
            return


@functools.cache
def one_thread_of_numpy() -> None:
    """For products that are small: the OpenBLAS in numpy's wheel lets its idle threads spin for 25 ms after each."""
    found = find_spec("numpy")
    for path in (Path(str(found and found.origin)).parents[1] / "numpy.libs").glob("libscipy_openblas*"):
        opened = ctypes.CDLL(str(path))
        if hasattr(opened, SET_NUMPY):
            getattr(opened, SET_NUMPY)(1)


@functools.cache
def load() -> str:
    """The name of the library that was loaded, "" if none. Call it before mlx.core is imported."""
    # macOS has Accelerate.
    if not sys.platform.startswith("linux"):
        return ""
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # else MKL's idle threads spin on the cores that compute everything else
    for name in candidates():
        try:
            # MLX's CPU wheel calls cblas in the library that was loaded first. The reference build that comes with it makes
            # about 7 GFLOP/s; one that is loaded globally before mlx.core takes precedence: 200 and more on two cores,
            # float32 only. Takes 15 ms.
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    return ""
