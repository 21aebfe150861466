"""Training and encoding of a retriever of T5-base size, in MLX and in PyTorch: `python -m tests.bench.retriever --help`.

Weights and token ids are random, because time and memory depend on shapes alone. Every case runs in a process of its own and
gives one row of JSON. All tokens are real: 32 of a query, 256 of a document, in bfloat16.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

import stages  # noqa: F401  (before mlx.core)
from stages.footprint import peak_resident
from tests.bench.environment import describe
from tests.bench.retriever_cases import DIMENSIONS, LIMIT_S, SIZES, TARGETS, TORCH_PLANS, RetrieverCase, comparison
from tests.bench.retriever_page import page


def time_calls(call: Callable[[], Any], count: int) -> dict[str, float]:
    """`count` + 3 calls: seconds of the first, and the median and least of the last `count`."""
    seconds = []
    for _ in range(count + 3):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return {"first_s": seconds[0], "s": statistics.median(seconds[3:]), "least_s": min(seconds[3:])}


def measure_mlx(case: RetrieverCase) -> dict[str, float]:
    from stages.tuner.blockwise.device import configure_scheduler

    configure_scheduler()  # as in training, before the first MLX array
    import mlx.core as mx

    from stages.models.t5.model import T5, T5Config
    from stages.retrieval.train.config import LossConfig, TrainConfig
    from stages.retrieval.train.objective import Contrast
    from stages.tuner.blockwise.backprop import BlockwiseForward
    from stages.tuner.memory import MemoryPlan
    from stages.tuner.step import TrainingStep, choose_targets, starting_adapter

    sizes = T5Config.from_dict(case.config, DIMENSIONS)
    rng = np.random.default_rng(0)
    weights = {n: mx.array(rng.normal(size=s) / s[-1] ** 0.5, getattr(mx, case.dtype)) for n, s in sizes.shapes().items()}
    model = T5(sizes, weights)
    mx.eval(weights)
    config = TrainConfig(batch_size=case.batch, rank=case.rank, targets=TARGETS, micro_batch=case.micro_batch or None)
    targets = choose_targets(model.linears(), config)
    training = TrainingStep(model, Contrast(LossConfig()), targets, config, starting_adapter(model, targets, config))
    encoder = BlockwiseForward(model)
    batch = random_batch(case)
    encoder.live_bytes = int(1e9 * case.memory_gb) or None
    training.memory = MemoryPlan(case.plan, encoder.live_bytes)
    ids = mx.array(batch.document_BMK[:, 0])
    real = mx.ones(ids.shape, mx.bool_)

    losses: list[float] = []

    def step() -> None:
        done = training.step([batch], 1e-4)
        losses.append(statistics.fmean(done.losses))
        if not done.finite:
            raise ValueError("the gradient is not finite")

    mx.reset_peak_memory()
    times = time_calls((lambda: encoder(ids=[ids], real=[real])) if case.kind == "encode" else step, case.steps)
    return times | {"peak_gb": mx.get_peak_memory() / 1e9} | ({"loss": losses[-1]} if losses else {})


def random_batch(case: RetrieverCase) -> Any:
    from stages.retrieval.train.data import PairBatch

    query, document = case.ids()
    groups = np.arange(case.batch, dtype=np.int32)
    real = np.ones(query.shape, bool), np.ones(document[:, None].shape, bool)
    texts = np.array([[str(n)] for n in groups])
    return PairBatch(list(groups), query, real[0], document[:, None], real[1], groups, groups[:, None], texts)


def run(case: RetrieverCase) -> dict[str, Any]:
    if case.backend == "torch":
        from tests.bench.retriever_torch import DEVICE, measure_torch

        gpu, measured = DEVICE == "cuda", measure_torch(case, time_calls)
    else:
        import mlx.core as mx

        gpu, measured = mx.default_device() == mx.gpu, measure_mlx(case)
    if not gpu:  # PyTorch does not count its memory there
        measured |= {"peak_gb": peak_resident() / 1e9, "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))}
    return asdict(case) | measured | {"samples_per_s": case.batch / measured["s"]} | describe(case.backend)


@click.command()
@click.option("--size", type=click.Choice(list(SIZES)), default="base", show_default=True, help="Size of the encoder.")
@click.option("--batch", default=64, show_default=True, help="Pairs of a batch.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--case", "only", help="Measure this one case in this process, a JSON object.")
@click.option("--steps", type=int, help="Steps to measure, instead of those of each case.")
@click.option("--table", type=click.Path(path_type=Path), help="Measure nothing; print the rows of this file as a page.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/retriever.jsonl"), show_default=True)
def main(size: str, batch: int, dtype: str, only: str | None, steps: int | None, table: Path | None, out: Path) -> None:
    """Measure training and encoding of a retriever in MLX, and in PyTorch if it is installed. Rows are added to --out."""
    if table:
        click.echo("\n".join(page([json.loads(text) for text in table.read_text().splitlines()])))
        return
    if only:
        click.echo(json.dumps(run(RetrieverCase(**json.loads(only)))))
        return
    plans = TORCH_PLANS if importlib.util.find_spec("torch") else ()
    out.parent.mkdir(parents=True, exist_ok=True)
    for case in comparison(size, batch, dtype, plans):
        row = isolated(replace(case, steps=steps) if steps else case)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        name = f"{row['kind']:7} {row['backend']:6} {row['plan']:22} B{row['batch']:<4} micro {row['micro_batch']:<4}"
        found = row.get("error") or f"{row['samples_per_s']:9.1f} samples/s  {row.get('peak_gb', 0):7.2f} GB"
        click.echo(f"{name} {found}")


def isolated(case: RetrieverCase) -> dict[str, Any]:
    """Measure a case in a process of its own. A failure gives a row with the last line of the error."""
    command = [sys.executable, "-m", "tests.bench.retriever", "--case", json.dumps(asdict(case))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return asdict(case) | {"error": f"took longer than {LIMIT_S} s"}
    if done.returncode:
        return asdict(case) | {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


if __name__ == "__main__":
    main()
