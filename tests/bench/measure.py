"""Measure: training steps by family, resolution, plan, bits and backend; encoding; reading. `latentmill bench --help`.

Every case runs in a process of its own, on random weights in a family's true shape, and gives one row. Rows are lines of
JSON, which DuckDB reads as a table: select * from 'build/bench.jsonl'.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import stages  # noqa: F401  (before mlx.core)
from stages.tuner.blockwise.backprop import BUFFER, limit_command_buffers
from tests.bench.cases import TORCH_PLANS, UNFUSED, Case, bars, large, quick, standard
from tests.bench.page import line, page

KINDS = ("train", "autoencoder", "text_encoder", "loader")
KERNELS = "MLX_PTX_CACHE_DIR"  # CUDA: where MLX keeps the kernels that it has compiled
LIMIT_S = 180  # a first step compiles kernels for a minute at most; loading dev takes another half


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

    from stages.text_to_image.families import family
    from stages.text_to_image.train import memory_plan
    from stages.tuner.blockwise.meter import Meter, budget
    from tests.bench.steps import Rig, settings

    plan: Any = int(case.plan) if case.plan.isdigit() else case.plan
    if case.tight:
        limit_command_buffers()  # as training does, before MLX's first operation
    found_family = family(case.family)
    c = settings(case.optimizer, base_bits=case.bits, rank=case.rank)
    rig = Rig(found_family, c, memory_plan.Batch(1, case.width, case.height, found_family.text_tokens))
    sizes = {"load_peak_gb": mx.get_peak_memory(), "held_gb": mx.get_active_memory()}
    estimate = memory_plan.MemoryEstimator(c, rig.config).estimate(rig.batch, 1)
    rig.bound = memory_plan.bound(estimate, plan, budget()) if case.tight else None
    mx.clear_cache()
    mx.reset_peak_memory()
    found: dict[str, Any] = measure(functools.partial(rig.step, plan), case.steps)
    sizes |= {"peak_gb": mx.get_peak_memory(), "cache_gb": mx.get_cache_memory()}
    sizes |= {"foretold_gb": estimate.need(plan)} if plan != "plain" else {}
    meter = Meter()
    rig.step(plan, meter)
    sizes |= {f"{row['phase']}_gb": row["peak"] for row in meter.rows}
    found |= {"tokens": rig.batch.length, "dtype": c.precision}
    return found | {name: size / 1e9 for name, size in sizes.items()}


def run_encoder(case: Case) -> dict[str, Any]:
    """Encode one image, or one caption, a few times."""
    import mlx.core as mx

    from stages.text_to_image.families import family
    from tests.bench.encoders import Captions, Images

    found, dtype = family(case.family), getattr(mx, case.dtype)
    encoder = Images(found, (case.width, case.height), dtype) if case.kind == "autoencoder" else Captions(found, dtype)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    return measure(encoder.step, case.steps) | {"peak_gb": mx.get_peak_memory() / 1e9, "held_gb": held / 1e9}


def run_loader(case: Case) -> dict[str, Any]:
    """Read latents and embeddings of 24 samples per step that is asked for."""
    from stages.text_to_image.families import family
    from tests.bench.reading import read_epoch

    found = family(case.family)
    return read_epoch(24 * case.steps, case.width, found.text_tokens, found.transformer["joint_attention_dim"])


def run(case: Case) -> dict[str, Any]:
    """A case's row: what was asked, what was found, on what."""
    if case.kind not in KINDS:
        raise ValueError(f"kind: {case.kind!r} is not known; there are {', '.join(KINDS)}")
    if case.backend == "torch" and case.plan not in TORCH_PLANS:
        raise ValueError(f"plan: PyTorch knows no {case.plan!r}; there are {', '.join(TORCH_PLANS)}")
    if case.backend == "torch":
        from tests.bench.torch_steps import run_torch

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


def revision() -> str:
    """The commit of the code that runs, where git knows it; -dirty where files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    said = ""
    for command in (["ls-files", "--error-unmatch", Path(__file__).name], ["describe", "--always", "--dirty", "--exclude=*"]):
        try:
            done = subprocess.run([*git, *command], capture_output=True, text=True, check=False)
        except OSError:  # there is no git
            return ""
        said = "" if done.returncode else done.stdout.strip()
        if not said:
            return ""
    return said


def apart(case: Case, limit_s: float = LIMIT_S, about: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The same in a process of its own, which has `about` in its environment where nothing else is said there.

    A failure is a row too, and so is taking too long; then all that the process has started ends with it.
    """
    command = [sys.executable, "-m", "tests.bench.measure", "--one", case.text]
    environment = {**(about or {}), **os.environ, **(UNFUSED if case.unfused else {})}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, process_group=0) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return asdict(case) | {"error": f"stopped after {limit_s:g} s"}
    if process.returncode:
        return asdict(case) | {"error": (err.strip().splitlines() or [f"exit {process.returncode}"])[-1]}
    row: dict[str, Any] = json.loads(out.splitlines()[-1])
    return row


@click.command()
@click.option("--one", default="", hidden=True, help="a case as JSON: run it here and print its row")
@click.option("--case", "cases", multiple=True, help="A case as JSON, fields left out have defaults; may be repeated.")
@click.option("--family", default="", help="Training steps of that family, every plan, bits and resolution.")
@click.option(
    "--bars", "judged", is_flag=True, help="What the trainer is judged by: klein 4B beside PyTorch and the plain graph."
)
@click.option("--large", "larger", is_flag=True, help="dev and klein 9B at 4 and 8 bits, the encoders, the loader.")
@click.option("--gpu", is_flag=True, help="--bars and --large.")
@click.option("--limit", default=LIMIT_S, show_default=True, help="Seconds that one case may take.")
@click.option("--commit", envvar="LATENTMILL_COMMIT", help="The code's, where git is not there to ask.")
@click.option("--table", type=click.Path(path_type=Path, exists=True), help="Measure nothing: a file of rows as a Markdown page.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default="build/bench.jsonl", show_default=True)
def main(
    one: str,
    cases: tuple[str, ...],
    family: str,
    judged: bool,
    larger: bool,
    gpu: bool,
    limit: float,
    commit: str | None,
    table: Path | None,
    out: Path,
) -> None:
    """Measure, print a line per case, and add its row to --out as JSON; without options a few quick ones that any CPU runs."""
    if one:
        click.echo(json.dumps(run(Case.of(one))))
        return
    if table:
        click.echo("\n".join(page([json.loads(text) for text in table.read_text(encoding="utf-8").splitlines()])))
        return
    wanted = [Case.of(case) for case in cases]
    wanted += list(bars()) if judged or gpu else []
    wanted += list(large()) if larger or gpu else []
    wanted += list(standard(family)) if family else []
    series(wanted or list(quick()), limit, revision() if commit is None else commit, out)


def series(cases: list[Case], limit_s: float, commit: str, out: Path) -> None:
    """Measure these, one after another, as one run: what may be compared. ClickException in the end if any failed.

    On CUDA a run begins without compiled kernels, so that its first case says what a first step costs.
    """
    about = {"run": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "commit": commit}
    out.parent.mkdir(parents=True, exist_ok=True)
    failed = 0
    click.echo(line(None))
    with tempfile.TemporaryDirectory() as kernels:
        for case in cases:
            row = apart(case, limit_s, {KERNELS: kernels}) | about
            failed += "error" in row
            click.echo(line(row))
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    click.echo(f"{len(cases)} rows added to {out}")
    if failed:
        raise click.ClickException(f"{failed} of {len(cases)} cases failed")


if __name__ == "__main__":
    main()
