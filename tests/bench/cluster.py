"""Measure the committer alone, and Ray workers on a stand-in of known cost. Both need no model."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import on_ray, runner
from pipeline.project.project import Project
from pipeline.store.disk import size_of
from pipeline.store.table import TableFolder, Writer
from pipeline.terminal import Quiet
from schemas.text_to_image import LATENTS
from stages.run import Run
from stages.stage import Artifact
from tests.bench.reading import empty_row

ROWS_PER_BATCH = 64
STAND_IN = """
[project]
pipeline = "tests.bench.waiting"
workers = "ray"
worker_count = {workers}
unit_rows = 1

[waits]
count = {count}
seconds = {seconds}
"""


def measure_commits(rows: int, pixels: int) -> dict[str, Any]:
    """Rows and megabytes per second of committing random latents of square images of `pixels`, and the bytes of a row."""
    shape = (128, pixels // 16, pixels // 16)
    size = int(np.prod(shape))
    values = np.random.default_rng(0).integers(0, 1 << 14, ROWS_PER_BATCH * size, dtype=np.uint16)
    tensor = LATENTS.batch.field("tensor")
    offsets = pa.array(np.arange(ROWS_PER_BATCH + 1, dtype=np.int32) * size)
    lists = pa.ListArray.from_arrays(offsets, pa.array(values), type=tensor.type)
    template = [empty_row(LATENTS) | {"shape": list(shape), "dtype": "bfloat16"} for _ in range(ROWS_PER_BATCH)]
    columns = (
        pa.Table.from_pylist(template, schema=pa.schema(LATENTS.columns)).append_column(tensor, lists).select(LATENTS.batch.names)
    )
    with tempfile.TemporaryDirectory(dir=os.environ.get("LATENTMILL_BENCH_FOLDER")) as folder:
        began = time.perf_counter()
        with Writer(TableFolder(Path(folder) / "latents", LATENTS), {"stage": "latents"}) as writer:
            for start in range(0, rows, ROWS_PER_BATCH):
                ids = [hashlib.sha256(str(start + n).encode()).hexdigest() for n in range(ROWS_PER_BATCH)]
                means = pa.array(np.random.default_rng(start).standard_normal(ROWS_PER_BATCH, np.float32))
                batch = columns
                for name, values in {"latent_id": pa.array(ids), "image_id": pa.array(ids), "mean": means, "std": means}.items():
                    at = batch.schema.get_field_index(name)
                    batch = batch.set_column(at, batch.schema.field(at), values)
                writer.append(batch.combine_chunks().to_batches()[0])
            writer.flush()
            committed = time.perf_counter() - began
            memory = writer.stored.nbytes
            flushed = time.perf_counter()
            writer.finish(None, {})
            published = time.perf_counter() - flushed
            index = size_of(writer.table.index.path)
        count = -(-rows // ROWS_PER_BATCH) * ROWS_PER_BATCH
    return {
        "rows": count,
        "rows_s": count / committed,
        "mb_s": 2 * size * count / committed / 1e6,
        "publish_s": published,
        "index_bytes_row": index / count,
        "memory_bytes_row": memory / count,
        "s": committed / count,
    }


def measure_workers(workers: int, count: int, seconds: float) -> dict[str, Any]:
    """`count` units that only wait `seconds` each: units per second, the speed relative to one worker, overhead and CPU in ms."""
    arrived: list[float] = []
    used: list[tuple[float, float]] = []  # CPU seconds of this process and of the workers
    processes: set[int] = set()

    def compute(run: Run[Any]) -> Iterator[pa.RecordBatch | Artifact]:
        for number, item in enumerate(on_ray.compute(project, "waits", run), 1):
            assert isinstance(item, pa.RecordBatch)
            if len(processes) < workers:  # the time begins when every worker has shown its first result
                processes.add(item["process"][0].as_py())
                arrived.clear()
                used[:] = [cpu_seconds(processes)]
            arrived.append(time.perf_counter())
            if number == count:  # the workers end after it
                used.append(cpu_seconds(processes))
            yield item

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "project.toml").write_text(STAND_IN.format(workers=workers, count=count, seconds=seconds), encoding="utf-8")
        project = Project(folder)
        runner.run(project, "waits", Quiet("waits"), compute=compute)
    elapsed, units = arrived[-1] - arrived[0], len(arrived) - 1
    driver, theirs = (1000 * (end - start) / units for start, end in zip(*used, strict=True))
    return {
        "workers": workers,
        "unit_s": seconds,
        "s": elapsed / units,
        "speed": units * seconds / elapsed,
        "overhead_ms": 1000 * (elapsed * workers / units - seconds),
        "driver_cpu_ms": driver,
        "worker_cpu_ms": theirs,
    }


def cpu_seconds(processes: Iterable[int]) -> tuple[float, float]:
    import psutil

    times = [psutil.Process(process).cpu_times() for process in processes]
    return time.process_time(), sum(each.user + each.system for each in times)
