"""Measure: training steps by family, resolution, plan, bits and backend; encoding; reading. `latentmill bench --help`.

Every case runs in a process of its own, on random weights in a family's true shape, and gives one row. Rows are lines of
JSON, which DuckDB reads as a table: select * from 'bench.jsonl'.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

import stages  # noqa: F401  (before mlx.core)
from pipeline.bench_table import page

UNFUSED = {"MLX_CUDA_USE_CUDNN_SDPA": "0"}  # how Metal routes training
BUFFER = "MLX_MAX_MB_PER_BUFFER"  # CUDA: what is handed over at once; MLX reads it when the first operation is computed
TIGHT_MB = "200"  # frees sooner; at 512 px that costs a quarter of the time
KINDS = ("train", "autoencoder", "text_encoder", "loader")


@dataclass(frozen=True)
class Case:
    """One set-up. `plan` is backprop's for MLX; for torch: eager or compiled, with +checkpoint."""

    family: str = "klein-base-4b"
    width: int = 1024
    height: int = 1024
    plan: str = "blocks"
    bits: int = 16
    rank: int = 32
    optimizer: str = "adamw"
    tight: bool = False  # hold live memory near what the plan is expected to need, as training does; else MLX's own limit holds
    unfused: bool = False
    backend: str = "mlx"
    kind: str = "train"  # of KINDS
    dtype: str = "bfloat16"  # of the encoders; training takes bfloat16, float32 on a CPU
    steps: int = 6

    @property
    def image_tokens(self) -> int:
        """L."""
        return self.width // 16 * (self.height // 16)


def measure(step: Callable[[], Any], steps: int) -> dict[str, float]:
    """Seconds of the first step and the median, least and most of the others, the second left out as warm-up too."""
    seconds = []
    for _ in range(steps + 2):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    warm = seconds[2:]
    return {"first_s": seconds[0], "s": statistics.median(warm), "least_s": min(warm), "most_s": max(warm)}


def run_train(case: Case) -> dict[str, Any]:
    """Train a few steps with the tuner; one more, phase by phase, says where memory peaks."""
    import mlx.core as mx

    from pipeline.bench_train import Rig, settings
    from stages import fit
    from stages.models.families import family
    from stages.tuner.memory import Meter, budget

    found_family = family(case.family)
    c = settings(case.optimizer, base_bits=case.bits, rank=case.rank)
    rig = Rig(found_family, c, fit.Batch(1, case.width, case.height, found_family.text_tokens))
    sizes = {"load_peak_gb": mx.get_peak_memory(), "held_gb": mx.get_active_memory()}
    plan: Any = int(case.plan) if case.plan.isdigit() else case.plan
    estimate = fit.Question(c, rig.config).estimate(rig.batch, 1)
    need = estimate.need(plan)
    rig.bound = fit.bound(estimate, plan, budget()) if case.tight else None
    mx.clear_cache()
    mx.reset_peak_memory()
    found: dict[str, Any] = measure(functools.partial(rig.step, plan), case.steps)
    sizes |= {"peak_gb": mx.get_peak_memory(), "foretold_gb": need, "cache_gb": mx.get_cache_memory()}
    meter = Meter()
    rig.step(plan, meter)
    sizes |= {f"{row['phase']}_gb": row["peak"] for row in meter.rows}
    found |= {"tokens": rig.batch.length, "dtype": c.precision}
    return found | {name: size / 1e9 for name, size in sizes.items()}


def run_encoder(case: Case) -> dict[str, Any]:
    """Encode one image, or one caption, a few times."""
    import mlx.core as mx

    from pipeline.bench_models import Captions, Images
    from stages.models.families import family

    found, dtype = family(case.family), getattr(mx, case.dtype)
    encoder = Images(found, (case.width, case.height), dtype) if case.kind == "autoencoder" else Captions(found, dtype)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    return measure(encoder.step, case.steps) | {"peak_gb": mx.get_peak_memory() / 1e9, "held_gb": held / 1e9}


def run_loader(case: Case) -> dict[str, Any]:
    """Read latents and embeddings of 24 samples per step that is asked for."""
    from pipeline.bench_reading import read_epoch
    from stages.models.families import family

    found = family(case.family)
    return read_epoch(24 * case.steps, case.width, found.text_tokens, found.transformer["joint_attention_dim"])


def run(case: Case) -> dict[str, Any]:
    """A case's row: what was asked, what was found, on what."""
    if case.kind not in KINDS:
        raise ValueError(f"kind: {case.kind!r} is not known; there are {', '.join(KINDS)}")
    if case.tight:
        os.environ.setdefault(BUFFER, TIGHT_MB)
    if case.backend == "torch":
        from pipeline.bench_torch import run_torch

        found = run_torch(case, measure)
    else:
        found = {"train": run_train, "loader": run_loader}.get(case.kind, run_encoder)(case)
    return asdict(case) | found | where(case.backend)


def where(backend: str) -> dict[str, Any]:
    """Chip, versions, date."""
    if backend == "torch":
        import torch

        chip, version = torch.cuda.get_device_name(), str(torch.__version__)
    else:
        import mlx.core as mx

        # "CPU" and its machine, as the CPU backend knows no name of its own
        chip = str(mx.device_info().get("device_name") or f"CPU {platform.machine()}")
        version = importlib.metadata.version("mlx")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    about = {"chip": chip, "version": version, "system": platform.system(), "python": platform.python_version(), "date": date}
    return about | {"latentmill": latentmill(), "buffer_mb": os.environ.get(BUFFER, "")}


def latentmill() -> str:
    """The installed version; empty where the code runs as it lies there."""
    try:
        return importlib.metadata.version("latentmill")
    except importlib.metadata.PackageNotFoundError:
        return ""


def apart(case: Case) -> dict[str, Any]:
    """The same in a process of its own; a failure is a row too."""
    command = [sys.executable, "-m", "pipeline.bench", "--one", json.dumps(asdict(case))]
    environment = os.environ | (UNFUSED if case.unfused else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return asdict(case) | {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def quick() -> Iterator[Case]:
    """A minute on a CPU: every kind of case, with the tiny family."""
    yield Case("tiny", 256, 256, kind="loader", steps=1)
    yield Case("tiny", 256, 256, kind="autoencoder", dtype="float32", steps=3)
    yield Case("tiny", 256, 256, kind="text_encoder", dtype="float32", steps=3)
    for plan in ("whole", "blocks"):
        yield Case("tiny", 256, 256, plan, steps=3)
    yield from (Case("tiny", 256, 256, "blocks", bits, tight=True, steps=3) for bits in (8, 4))


def standard(family: str) -> Iterator[Case]:
    """A family's training steps, by plan, bits and resolution, beside PyTorch where it is installed."""
    for px in (512, 768, 1024):
        yield Case(family, px, px, "whole")
        yield Case(family, px, px, "blocks")
        yield from (Case(family, px, px, "blocks", bits, tight=True) for bits in (16, 8, 4))
    yield Case(family, plan="12", tight=True)
    yield Case(family, height=1008, tight=True)  # 4544 rows: no multiple of 128
    yield Case(family, 512, 528, plan="whole")
    yield Case(family, unfused=True, tight=True)
    if importlib.util.find_spec("torch"):
        for px in (512, 1024):
            for plan in ("eager", "compiled", "compiled+checkpoint"):
                yield Case(family, px, px, plan, backend="torch")


def large() -> Iterator[Case]:
    """The larger families, packed, and the encoders."""
    for bits in (4, 8):
        for px in (512, 768, 1024):
            yield Case("dev", px, px, bits=bits, optimizer="adamw8bit", tight=True, steps=3)
            yield Case("klein-base-9b", px, px, bits=bits, tight=True, steps=3)
    yield Case("dev", 512, 512, bits=4, tight=True, steps=3)
    yield from (Case(kind="autoencoder", dtype=dtype, steps=3) for dtype in ("bfloat16", "float32"))
    yield Case(kind="text_encoder", steps=3)


@click.command()
@click.option("--one", default="", hidden=True, help="a case as JSON: run it here and print its row")
@click.option("--case", "cases", multiple=True, help="A case as JSON, fields left out have defaults; may be repeated.")
@click.option("--family", default="", help="Training steps of that family, every plan, bits and resolution.")
@click.option("--gpu", is_flag=True, help="All cases for a GPU: klein 4B beside PyTorch, the larger families, the encoders.")
@click.option("--table", type=click.Path(path_type=Path, exists=True), help="Measure nothing: a file of rows as a Markdown page.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="A file to add the rows to.")
def main(one: str, cases: tuple[str, ...], family: str, gpu: bool, table: Path | None, out: Path | None) -> None:
    """Measure, and print one JSON row per case; without options a few quick ones that any CPU runs."""
    if one:
        click.echo(json.dumps(run(Case(**json.loads(one)))))
        return
    if table:
        rows = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
        click.echo("\n".join(page(rows)))
        return
    wanted = [Case(**json.loads(case)) for case in cases]
    wanted += list(standard("klein-base-4b")) + list(large()) if gpu else []
    wanted += list(standard(family)) if family else []
    for case in wanted or quick():
        line = json.dumps(apart(case))
        click.echo(line)
        if out:
            with out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
