"""Facts about this machine, and what is wrong with it for training: for `latentmill doctor`."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline import process

FILES = 1024  # open files that a run may need: shards, Lance, weights
LEAST_MACOS = (14, 0)  # MLX's oldest
NAX_MACOS = (26, 2)  # the wheel of MLX for M5 is built for this version
LEAST_MLX = (0, 32, 4)  # on macOS: attention with a gradient in blocks
DISK = 30e9  # bytes: weights of the smallest released family and room for tables
SMALL_MAC = 16 * 2**30 - 1


@dataclass(frozen=True)
class Machine:
    system: str
    macos: str  # version; "" elsewhere
    chip: str
    arch: str
    python: str
    memory: int  # bytes
    mlx: str
    device: str
    backend: str
    blas: str
    free_disk: int  # bytes
    files: int  # most that may be open
    translated: bool  # Python for Intel, under Rosetta
    heic: bool
    budget: int  # bytes that a stage may take


def examine(folder: Path = Path()) -> Machine:
    import stages
    from stages.tuner.blockwise.device import memory_budget

    import mlx.core as mx  # isort: skip  (after the BLAS that `stages` loads)

    info: dict[str, Any] = dict(mx.device_info())
    metal, cuda = mx.metal.is_available(), mx.cuda.is_available()
    backend = "CPU" if mx.default_device() == mx.cpu else "Metal" if metal else "CUDA" if cuda else "GPU"
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        macos=platform.mac_ver()[0] if sys.platform == "darwin" else "",
        chip=chip(),
        arch=platform.machine(),
        python=platform.python_version(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        mlx=process.version("mlx"),
        device=str(info.get("device_name", "")),
        backend=backend,
        blas="Accelerate" if sys.platform == "darwin" else Path(stages.BLAS).name,
        free_disk=shutil.disk_usage(folder).free,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        translated=sys.platform == "darwin" and sysctl("sysctl.proc_translated") == "1",
        heic=importlib.util.find_spec("pillow_heif") is not None,
        budget=memory_budget(),
    )


def chip() -> str:
    if sys.platform == "darwin":
        return sysctl("machdep.cpu.brand_string")
    try:
        found = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        return ""
    return found[0].partition(":")[2].strip() if found else ""


def sysctl(name: str) -> str:
    """A macOS kernel setting such as "hw.memsize"; "" if it cannot be read."""
    try:
        done = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def version(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def problems(machine: Machine) -> Iterator[str]:
    """One line per problem: what is wrong, and what the user can do about it."""
    if machine.macos:
        yield from _mac_problems(machine)
    if machine.files < FILES:
        yield f"only {machine.files} files may be open: run `ulimit -n 4096` in this shell"
    if machine.system.startswith("Linux") and machine.backend == "CPU" and not machine.blas:
        yield "no fast BLAS was found: run `pip install mkl`, or install OpenBLAS"
    if machine.free_disk < DISK:
        yield f"only {machine.free_disk / 1e9:.3g} GB of disk are free: weights of klein 4B take 16 GB"
    if not machine.heic:
        yield f"HEIC photographs cannot be read: run `{sys.executable} -m pip install pillow-heif`"


def _mac_problems(machine: Machine) -> Iterator[str]:
    if machine.translated or machine.arch == "x86_64":
        yield "Python is built for Intel and runs under Rosetta: MLX needs an arm64 Python, such as that of python.org"
    if version(machine.macos) < LEAST_MACOS:
        yield f"macOS {machine.macos} is too old for MLX: update to macOS 14 or later"
    if "M5" in machine.chip and NAX_MACOS > version(machine.macos) >= (26, 0):
        yield f"on an M5, MLX's kernels are built for macOS 26.2 and may fail on {machine.macos}: update macOS"
    if version(machine.mlx) < LEAST_MLX:
        yield f"MLX {machine.mlx} keeps all attention scores for the gradient on Metal: run `pip install --upgrade mlx`"
    if machine.backend != "Metal":
        yield "MLX does not use the GPU: check that Python is an arm64 build and that no setting chooses the CPU"
    if machine.memory < SMALL_MAC:
        yield "less than 16 GB of memory: only small families and 4-bit bases of klein 4B fit; see the table below"


def facts(machine: Machine) -> dict[str, Any]:
    return asdict(machine)
