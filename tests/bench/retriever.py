"""Training and encoding of a retriever of T5-base size, in MLX and in PyTorch: `python -m tests.bench.retriever --help`.

Weights and token ids are random, because time and memory depend on shapes alone. Every case runs in a process of its own and
gives one row of JSON. All tokens are real: 32 of a query, 256 of a document, in bfloat16.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

import stages  # noqa: F401  (before mlx.core)
from stages.footprint import peak_resident
from tests.bench.cases import RETRIEVER_PLANS, RETRIEVER_SIZES, RetrieverCase
from tests.bench.environment import describe
from tests.bench.isolate import run_isolated
from tests.bench.labels import Row, origin
from tests.bench.page import section
from tests.bench.run import time_steps

DIMENSIONS, TARGETS = 128, ("q", "k", "v", "o")
LIMITS_GB = {"train": 7.5, "encode": 1.5}  # of MLX at base size and 64 pairs: below the memory of compiled PyTorch in training
LIMIT_S = 150  # a case that takes longer is a row with an error, and the next begins
INTRODUCTION = """\
# Benchmark of the retriever

On one H200, training and encoding are faster than with PyTorch, compiled; on one thread of a CPU they are slower. The tables
say by how much, and what a limit of memory costs.

Generated from bench-retriever.jsonl by `python -m tests.bench.retriever --table data/measurements/bench-retriever.jsonl`.
`python -m tests.bench.retriever` measures. Weights and token ids are random and every token is real. PyTorch "transformers" is
`T5EncoderModel` with the same LoRA. Seconds are medians. Encoding is of documents alone. A limit is the memory at which MLX
starts no further operation until an earlier one has ended. On a CPU, the peak is of the whole process.
"""


def comparison(size: str, batch: int, dtype: str, torch_plans: tuple[str, ...]) -> Iterator[RetrieverCase]:
    """Yield the cases of one comparison: MLX and PyTorch in turn, training and encoding."""
    common = RetrieverCase(size=size, batch=batch, dtype=dtype)
    yield replace(common, memory_gb=LIMITS_GB["train"])
    yield from (replace(common, backend="torch", plan=plan) for plan in torch_plans)
    yield replace(common, kind="encode", memory_gb=LIMITS_GB["encode"])
    yield from (replace(common, kind="encode", backend="torch", plan=plan) for plan in torch_plans)
    yield common
    yield replace(common, kind="encode")
    yield replace(common, plan="blocks")
    yield replace(common, micro_batch=batch // 4)
    yield replace(common, batch=4 * batch, micro_batch=batch // 2, steps=5)


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
    times = time_steps((lambda: encoder(ids=[ids], real=[real])) if case.kind == "encode" else step, case.steps)
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

        gpu, measured = DEVICE == "cuda", measure_torch(case, time_steps)
    else:
        import mlx.core as mx

        gpu, measured = mx.default_device() == mx.gpu, measure_mlx(case)
    if not gpu:  # PyTorch does not count its memory there
        measured |= {"peak_gb": peak_resident() / 1e9, "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))}
    return asdict(case) | measured | {"samples_per_s": case.batch / measured["s"]} | describe(case.backend)


def page(rows: list[Row]) -> Iterator[str]:
    good = [row for row in rows if "error" not in row]
    yield from (*INTRODUCTION.splitlines(), "")
    for size, dtype in dict.fromkeys((row["size"], row["dtype"]) for row in good):
        some = [row for row in good if (row["size"], row["dtype"]) == (size, dtype)]
        title = f"T5 {size}, {dtype}, {some[0]['query']} and {some[0]['document']} tokens, rank {some[0]['rank']}"
        yield from section(title, "", "| | pairs | limit, GB | samples/s | seconds | peak GB |", map(line, some))
    yield from ("Machines and versions:", "", *(f"- {where}" for where in sorted({origin(row) for row in good})))


def line(row: Row) -> str:
    words = [row["kind"], "MLX" if row["backend"] == "mlx" else "PyTorch", row["plan"]]
    words += [f"micro-batch {row['micro_batch']}"] if row["micro_batch"] else []
    words += ["without cuDNN's attention"] if row.get("unfused") else []
    words += [f"threads: {row['threads']}"] if row.get("threads") else []
    limit = f"{row['memory_gb']:g}" if row["memory_gb"] else ""
    peak = f"{row['peak_gb']:.2f}" if row.get("peak_gb") else ""
    rate = f"{row['samples_per_s']:.{0 if row['samples_per_s'] >= 100 else 1}f}"
    return f"| {', '.join(words)} | {row['batch']} | {limit} | {rate} | {row['s']:.4f} | {peak} |"


@click.command()
@click.option("--size", type=click.Choice(list(RETRIEVER_SIZES)), default="base", show_default=True, help="Size of the encoder.")
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
    plans = RETRIEVER_PLANS if importlib.util.find_spec("torch") else ()
    out.parent.mkdir(parents=True, exist_ok=True)
    for case in comparison(size, batch, dtype, plans):
        row = run_isolated(replace(case, steps=steps) if steps else case, LIMIT_S, module=("tests.bench.retriever", "--case"))
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        name = f"{row['kind']:7} {row['backend']:6} {row['plan']:22} B{row['batch']:<4} micro {row['micro_batch']:<4}"
        found = row.get("error") or f"{row['samples_per_s']:9.1f} samples/s  {row.get('peak_gb', 0):7.2f} GB"
        click.echo(f"{name} {found}")


if __name__ == "__main__":
    main()
