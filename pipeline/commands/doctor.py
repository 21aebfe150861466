"""`latentmill doctor`: what this machine is, what it can train, what is wrong and how to mend it."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

import stages
from pipeline import process
from pipeline.commands import own
from pipeline.commands.families import all_families, download
from pipeline.options import FOLDER, JSON, NAMES, give_json
from pipeline.store.disk import format_bytes
from pipeline.terminal import fold, format_table, say_aside, tell
from stages.pipelines import load

FILES = 1024  # open files that a run may need: shards, Lance, weights
LEAST_MACOS = (14, 0)  # MLX's oldest
NAX_MACOS = (26, 2)  # the wheel of MLX for M5 is built for this version
LEAST_MLX = (0, 32, 4)  # on macOS: attention with a gradient in blocks
DISK = 30e9  # bytes: weights of the smallest released family and room for tables
SMALL_MAC = 16 * 2**30 - 1
# A step of klein base 4B at 768 px: 6 operations x 3.9e9 weights x 2,800 tokens = 6.5e13, 1 to 11 min at 1 to 0.1 TFLOP/s.
ON_CPU = (
    "MLX computes on the CPU here: a model of billions of weights trains for days or weeks (computed, not measured). Take a Mac "
    'with Apple Silicon or an NVIDIA GPU, or try everything with family = "micro" in [project].'
)
PLANS = (
    "Whole computes no block twice, blocks every block; blocks kept: so many are not computed twice. "
    "Streamed: blocks stay on disk."
)


@click.command("doctor")
@click.option(*NAMES, "folder", type=click.Path(path_type=Path, exists=True), default=FOLDER, help="The project.")
@click.option("--measure", "measured", is_flag=True, help="Also run probes of speed and memory, about ten minutes.")
@click.option("--family", "name", default="klein-base-4b", show_default=True, help="The family whose shapes the probes have.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default="latentmill-doctor.json",
    show_default=True,
    help="The file that --measure writes.",
)
@JSON
def command(folder: Path, measured: bool, name: str, out: Path, as_json: bool) -> None:
    """Show what this machine is, what it can train, and what is wrong with it. With --measure, also run probes for about
    ten minutes. A probe is a short measurement of speed or memory. Some probes train a model with random weights of
    the family's shapes (--family), so no files of weights are needed. The results are written to the JSON file --out.
    """
    machine = examine(folder)
    if as_json:
        give_json({"machine": asdict(machine), "problems": list(problems(machine))})
    for line in () if as_json else report(machine):
        tell(fold(line))
    if measured:
        result = {"machine": asdict(machine), "family": name, "probes": list(measure(name, machine.budget))}
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        tell(f"written: {out}. Please attach it to an issue: it holds facts about the machine, and no names or files.")


def report(machine: Machine) -> Iterator[str]:
    system = f"macOS {machine.macos}" if machine.macos else machine.system
    rows = {
        "machine": f"{machine.chip or 'unknown chip'} ({machine.arch}), {format_bytes(machine.memory)} of memory",
        "system": f"{system}, Python {machine.python}",
        "MLX": f"{machine.mlx} on {machine.backend}{f' ({machine.device})' if machine.device else ''}",
        "BLAS": machine.blas or "MLX's own",
        "disk": f"{format_bytes(machine.free_disk)} free here",
        "memory": f"{format_bytes(machine.budget)} for training and drawing",
    }
    for name, text in rows.items():
        yield f"{name:8} {text}"
    found = list(problems(machine))
    yield "problems" if found else "no problem was found"
    yield from (f"  - {line}" for line in found)
    for pipeline in map(stages.pipeline, stages.PIPELINES):
        if pipeline.capacity:
            head, *body = load(pipeline.capacity)(machine.budget)
            yield f"what fits into {format_bytes(machine.budget)} ({pipeline.name}; computed from shapes, training at batch 1)"
            yield from format_table(head, body).splitlines()
            yield PLANS
    if machine.backend == "CPU":
        yield ON_CPU


def measure(name: str, budget: int) -> Iterator[dict[str, Any]]:
    """One dict of figures per probe, with "error" if it fails or does not fit into `budget` bytes."""
    probes: dict[str, Callable[[], dict[str, Any]]] = {"product": product, "attention gradient": attention_gradient}
    for each in map(own, stages.PIPELINES):
        probes |= load(each.probes)(name, budget) if each.probes else {}
    for title, probe in probes.items():
        began = time.perf_counter()
        say_aside(f"probe: {title}")
        try:
            figures = probe()
        except (ValueError, RuntimeError) as error:
            figures = {"error": " ".join(str(error).split())}
        yield {"probe": title, **figures, "wall_s": round(time.perf_counter() - began, 2)}


def product(size: int = 2048) -> dict[str, Any]:
    """Speed of products of square matrices, TFLOP/s by dtype; bfloat16 is left out on a CPU."""
    import mlx.core as mx

    rates = {}
    for dtype in (mx.float32, mx.bfloat16) if mx.default_device() != mx.cpu else (mx.float32,):
        a = mx.random.normal((size, size)).astype(dtype)
        mx.eval(a @ a)
        began = time.perf_counter()
        for _ in range(8):
            mx.eval(a @ a)
        rates[str(dtype).rpartition(".")[2]] = 8 * 2 * size**3 / (time.perf_counter() - began) / 1e12
    return {"tflops": rates}


def attention_gradient(length: int = 1536) -> dict[str, Any]:
    """Whether the gradient of attention keeps the matrix of scores (a fused one does not); peak without the inputs."""
    import mlx.core as mx

    dtype = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
    q_BHLK = mx.random.normal((1, 8, length, 128)).astype(dtype)
    mx.eval(q_BHLK)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    gradient = mx.grad(lambda q: mx.fast.scaled_dot_product_attention(q, q, q, scale=0.1).astype(mx.float32).sum())
    mx.eval(gradient(q_BHLK))
    scores = 8 * length**2 * dtype.size
    extra = mx.get_peak_memory() - held
    return {"extra_bytes": extra, "scores_bytes": scores, "keeps_scores": extra > scores}


# The machine


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
    budget: int  # bytes that a stage may take


def examine(folder: Path = Path()) -> Machine:
    import mlx.core as mx

    from stages.tuner.blockwise.device import memory_budget

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
    if machine.macos:
        yield from _mac_problems(machine)
    if machine.files < FILES:
        yield f"only {machine.files} files may be open: run `ulimit -n 4096` in this shell"
    if machine.system.startswith("Linux") and machine.backend == "CPU" and not machine.blas:
        yield "no fast BLAS was found: run `pip install mkl`, or install OpenBLAS"
    if machine.free_disk < DISK:
        size, name = min((download(each), each.name) for each in all_families() if download(each) and not each.base)
        yield (
            f"only {machine.free_disk / 1e9:.3g} GB of disk are free, {DISK / 1e9:.0f} are wanted: "
            f"weights of {name} take {format_bytes(size)}, then there are tables and checkpoints"
        )


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
