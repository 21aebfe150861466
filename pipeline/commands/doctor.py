"""`latentmill doctor`: what this machine is, what it can train, what is wrong and how to mend it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

import stages
from pipeline.commands import own
from pipeline.machine import Machine, examine, facts, problems
from pipeline.store.disk import format_bytes
from pipeline.terminal import fold, format_table
from stages.pipelines import load

PLANS = (
    "Whole computes no block twice, blocks every block; blocks kept: so many are not computed twice. "
    "Streamed: blocks stay on disk."
)


@click.command("doctor")
@click.option("--measure", "measured", is_flag=True, help="Also run probes of speed and memory, about ten minutes.")
@click.option("--family", "name", default="klein-base-4b", show_default=True, help="The family whose shapes the probes have.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default="latentmill-doctor.json",
    show_default=True,
    help="The file that --measure writes.",
)
def command(measured: bool, name: str, out: Path) -> None:
    """Show what this machine is, what it can train, and what is wrong with it. With --measure, also run probes for about
    ten minutes. A probe is a short measurement of speed or memory. Some probes train a model with random weights of
    the family's shapes (--family), so no files of weights are needed. The results are written to the JSON file --out.
    """
    machine = examine()
    for line in report(machine):
        click.echo(fold(line))
    if measured:
        result = {"machine": facts(machine), "family": name, "probes": list(measure(name, machine.budget))}
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        click.echo(f"written: {out}. Please attach it to an issue: it holds facts about the machine, and no names or files.")


def report(machine: Machine) -> Iterator[str]:
    system = f"macOS {machine.macos}" if machine.macos else machine.system
    rows = {
        "machine": f"{machine.chip or 'unknown chip'} ({machine.arch}), {format_bytes(machine.memory)} of memory",
        "system": f"{system}, Python {machine.python}",
        "MLX": f"{machine.mlx} on {machine.backend}{f' ({machine.device})' if machine.device else ''}",
        "BLAS": machine.blas or "MLX's own",
        "disk": f"{format_bytes(machine.free_disk)} free here",
        "memory": f"a stage may take {format_bytes(machine.budget)}",
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


def measure(name: str, budget: int) -> Iterator[dict[str, Any]]:
    """One dict of figures per probe, with "error" if it fails or does not fit into `budget` bytes."""
    probes: dict[str, Callable[[], dict[str, Any]]] = {"product": product, "attention gradient": attention_gradient}
    for each in map(own, stages.PIPELINES):
        probes |= load(each.probes)(name, budget) if each.probes else {}
    for title, probe in probes.items():
        yield measured(title, probe)


def measured(title: str, probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    began = time.perf_counter()
    click.echo(f"probe: {title}", err=True)
    try:
        figures = probe()
    except (ValueError, RuntimeError) as error:
        figures = {"error": " ".join(str(error).split())}
    return {"probe": title, **figures, "wall_s": round(time.perf_counter() - began, 2)}


def product() -> dict[str, Any]:
    """Speed of 2048 x 2048 matrix products, TFLOP/s by dtype; bfloat16 is left out on a CPU."""
    import mlx.core as mx

    rates, size = {}, 2048
    for dtype in (mx.float32, mx.bfloat16) if mx.default_device() != mx.cpu else (mx.float32,):
        a = mx.random.normal((size, size)).astype(dtype)
        mx.eval(a @ a)
        began = time.perf_counter()
        for _ in range(8):
            mx.eval(a @ a)
        rates[str(dtype).rpartition(".")[2]] = 8 * 2 * size**3 / (time.perf_counter() - began) / 1e12
    return {"tflops": rates}


def attention_gradient() -> dict[str, Any]:
    """Whether the gradient of attention keeps the matrix of scores (a fused one does not); peak without the inputs."""
    import mlx.core as mx

    dtype = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
    q_BHLK = mx.random.normal((1, 8, 1536, 128)).astype(dtype)
    mx.eval(q_BHLK)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    gradient = mx.grad(lambda q: mx.fast.scaled_dot_product_attention(q, q, q, scale=0.1).astype(mx.float32).sum())
    mx.eval(gradient(q_BHLK))
    scores = 8 * 1536 * 1536 * dtype.size
    extra = mx.get_peak_memory() - held
    return {"extra_bytes": extra, "scores_bytes": scores, "keeps_scores": extra > scores}
