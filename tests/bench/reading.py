"""Measure how long a training step waits for its rows, and what their checksums add: the kinds "loader" and "checksums".

Latents and embeddings of a synthetic project (random values, the tensor shapes of a family at one resolution) are written
as shards into a temporary folder and read once in shuffled order, as training reads them: pages are prefetched one step
ahead, and each tensor is copied once into MLX. Measured are the time per step of reading alone (training overlaps it with the
device's work), and the anonymous memory of the process over the epoch, which must not grow with the table.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.store.checksums import tensor_checksum
from pipeline.store.shards import ShardReader, write_shard
from schemas.table import TableSchema
from schemas.text_to_image import EMBEDDINGS, LATENTS
from stages.tuner.loop import Loader
from tests.bench.peaks import anonymous_memory

ROWS_PER_SHARD = 8
STEP_S = (
    0.06  # seconds of a training step's work: klein 4B at 512 px takes 0.062 on one H200, the fastest device that was measured
)
EMPTY: dict[str, Any] = {"string": "", "bool": False, "float": 0.0, "double": 0.0, "int32": 0, "list<item: int32>": []}


def empty_row(schema: TableSchema) -> dict[str, Any]:
    """Null where a column allows it, else an empty value of its type."""
    return {field.name: None if field.nullable else EMPTY[str(field.type)] for field in schema.columns}


def write_random_rows(folder: Path, schema: TableSchema, shape: tuple[int, ...], count: int) -> pa.Table:
    """Each with one random 16-bit tensor of `shape`, under the keys "00000000", "00000001" and so on."""
    generator, tensor = np.random.default_rng(0), schema.batch.field("tensor")
    stored = []
    for start in range(0, count, ROWS_PER_SHARD):
        keys = [f"{row:08d}" for row in range(start, min(start + ROWS_PER_SHARD, count))]
        rows = [empty_row(schema) | {schema.key[0]: key, "shape": list(shape), "dtype": "bfloat16"} for key in keys]
        values = generator.integers(0, 1 << 14, len(rows) * int(np.prod(shape)), dtype=np.uint16)
        offsets = np.arange(len(rows) + 1, dtype=np.int32) * int(np.prod(shape))
        lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=tensor.type)
        table = pa.Table.from_pylist(rows, schema=pa.schema(schema.columns)).append_column(tensor, lists)
        stored.append(write_shard(folder, table.cast(schema.batch), schema))
    return pa.concat_tables(stored)


def read_steps(readers: tuple[ShardReader, ShardReader], count: int) -> Iterator[tuple[float, int]]:
    """In shuffled order; (seconds, anonymous memory in bytes) of every step."""
    import mlx.core as mx

    order = [f"{row:08d}" for row in np.random.default_rng(1).permutation(count)]
    for step, key in enumerate(order):
        began = time.perf_counter()
        arrays = [mx.array(reader.read(key)).view(mx.bfloat16) for reader in readers]
        mx.eval(arrays)
        for reader in readers:
            reader.ahead(order[step + 1 : step + 2])
        yield time.perf_counter() - began, anonymous_memory()


def read_epoch(count: int, pixels: int, text_rows: int, features: int) -> dict[str, Any]:
    """Write and read `count` samples, and return one benchmark row: median seconds per step, sizes and memory in GB.

    A sample is a latent of a square image of `pixels` and an embedding of (text_rows, features). The tables lie below the
    folder LATENTMILL_BENCH_FOLDER, or the system's temporary folder.
    """
    shapes = {LATENTS: (128, pixels // 16, pixels // 16), EMBEDDINGS: (text_rows, features)}
    with tempfile.TemporaryDirectory(dir=os.environ.get("LATENTMILL_BENCH_FOLDER")) as scratch:
        readers = []
        for schema, shape in shapes.items():
            folder = Path(scratch) / schema.name
            folder.mkdir()
            readers.append(ShardReader(folder, write_random_rows(folder, schema, shape, count), schema))
        steps = list(read_steps((readers[0], readers[1]), count))
    seconds, memory = zip(*steps, strict=True)
    settled = memory[len(memory) // 10 :]
    return {
        "read_gb": sum(2 * int(np.prod(shape)) for shape in shapes.values()) * count / 1e9,
        "rows": count,
        "s": statistics.median(seconds),
        "p99_s": sorted(seconds)[int(0.99 * count)],
        "anonymous_least_gb": min(settled) / 1e9,
        "anonymous_most_gb": max(settled) / 1e9,
        "anonymous_end_gb": memory[-1] / 1e9,
    }


class UncheckedReader(ShardReader):
    read = ShardReader.view


def time_sample(readers: list[ShardReader], key: str, released: str) -> float:
    """CPU seconds of this thread for one sample; the pages of `released`, read before, are given back first."""
    import mlx.core as mx

    for reader in readers:
        reader.ahead([released])
    began = time.thread_time()
    mx.eval([mx.array(reader.read(key)).view(mx.bfloat16) for reader in readers])
    return time.thread_time() - began


class SampleReader:
    """One sample per step, of the tensors of `readers` under the keys `order`."""

    def __init__(self, readers: list[ShardReader], order: list[str]) -> None:
        self.readers, self.order = readers, order

    def draw(self, step: int) -> list[list[str]]:
        return [[self.order[step % len(self.order)]]]

    def prefetch(self, samples: Iterable[str]) -> None:
        keys = list(samples)
        for reader in self.readers:
            reader.ahead(keys)

    def read(self, step: int, samples: list[str]) -> list[np.ndarray]:
        return [np.stack([reader.read(key) for key in samples]) for reader in self.readers]


def time_waits(readers: list[ShardReader], order: list[str], steps: int, step_s: float) -> float:
    """Median seconds that training waits for a sample read in the background; the device's work is a wait of `step_s`."""
    reader = SampleReader(readers, order)
    loss = types.SimpleNamespace(separable=False)
    task: Any = types.SimpleNamespace(objective=loss, draw=reader.draw, reader=lambda: reader)
    waits = []
    for _, _, waited in Loader(task, range(steps)):
        waits.append(waited)
        time.sleep(step_s)
    return statistics.median(waits[1:])  # nothing was read ahead of the first step


def check_samples(count: int, pixels: int, text_rows: int, features: int) -> dict[str, Any]:
    """Measure what checksums cost in reading `count` samples for training, and return one benchmark row: CPU seconds per sample.

    A sample is a latent of a square image of `pixels` and an embedding of (text_rows, features). Samples are read from mapped
    shards, which lie in the system's cache of files, with their checksums and without them in turns. `checked_s` and
    `unchecked_s` are the medians, `s` is the median of the differences, and `alone_s` that of the checksums of values in memory.
    Training reads a sample in the background, while the device computes the step before. So `waited_s`, with checksums, and
    `waited_unchecked_s` are the seconds of a step that training loses by reading, if the device's work takes STEP_S.
    """
    shapes = {LATENTS: (128, pixels // 16, pixels // 16), EMBEDDINGS: (text_rows, features)}
    seconds: dict[str, list[float]] = {"unchecked_s": [], "checked_s": [], "alone_s": []}
    with tempfile.TemporaryDirectory(dir=os.environ.get("LATENTMILL_BENCH_FOLDER")) as scratch:
        readers: dict[str, list[ShardReader]] = {"unchecked_s": [], "checked_s": []}
        for schema, shape in shapes.items():
            folder = Path(scratch) / schema.name
            folder.mkdir()
            rows = write_random_rows(folder, schema, shape, count)
            readers["checked_s"].append(ShardReader(folder, rows, schema))
            readers["unchecked_s"].append(UncheckedReader(folder, rows, schema))
        order = [f"{row:08d}" for row in np.random.default_rng(1).permutation(count)]
        for turn in range(6):
            for before, key in zip([*order[-1:], *order], order, strict=False):
                for what in sorted(readers, reverse=turn % 2 == 0):
                    seconds[what].append(time_sample(readers[what], key, before))
        for key in order:
            values = [np.array(reader.read(key)) for reader in readers["unchecked_s"]]
            np.zeros(1 << 26, np.uint8).sum()  # 64 MB push the values out of the processor's caches
            began = time.thread_time()
            for value in values:
                tensor_checksum(value)
            seconds["alone_s"].append(time.thread_time() - began)
        waits = {
            name: time_waits(readers[what], order, 3 * count, STEP_S)
            for name, what in (("waited_s", "checked_s"), ("waited_unchecked_s", "unchecked_s"))
        }
    added = [checked - unchecked for checked, unchecked in zip(seconds["checked_s"], seconds["unchecked_s"], strict=True)]
    medians = {what: statistics.median(found) for what, found in seconds.items()}
    size = sum(2 * int(np.prod(shape)) for shape in shapes.values())
    return {"sample_bytes": size, "rows": count, "s": statistics.median(added), "step_s": STEP_S} | medians | waits
