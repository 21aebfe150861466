"""Measure how long a training step waits for its rows: `python -m tests.bench.reading --gb 4`.

Latents and embeddings of a synthetic project (random values, the tensor shapes of a family at one resolution) are written
as shards into a temporary folder and read once in shuffled order, as training reads them: pages are prefetched one step
ahead, and each tensor is copied once into MLX. The output is one JSON row: the time per step of reading alone (training
overlaps it with the device's work), and the anonymous memory of the process over the epoch, which must not grow with the
table.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa

from pipeline.store.checksums import tensor_checksum
from pipeline.store.reader import ShardReader
from pipeline.store.shards import shards_folder, write_shard
from schemas.table import TableSchema
from schemas.text_to_image.embeddings import EMBEDDINGS
from schemas.text_to_image.latents import LATENTS

ROWS_PER_SHARD = 8
TEXT_ROWS = 512
EMPTY: dict[str, Any] = {"string": "", "bool": False, "float": 0.0, "double": 0.0, "int32": 0, "list<item: int32>": []}


def empty_row(schema: TableSchema) -> dict[str, Any]:
    """Return one row of a table without its tensors: null where a column allows it, else an empty value of its type."""
    return {field.name: None if field.nullable else EMPTY[str(field.type)] for field in schema.columns}


def write_random_rows(folder: Path, schema: TableSchema, shape: tuple[int, ...], count: int) -> pa.Table:
    """Write `count` rows, each with one random 16-bit tensor of `shape`, as shards; return their stored rows.

    The keys are "00000000", "00000001" and so on.
    """
    generator, tensor = np.random.default_rng(0), schema.batch.field("tensor")
    stored = []
    for number, start in enumerate(range(0, count, ROWS_PER_SHARD), 1):
        keys = [f"{row:08d}" for row in range(start, min(start + ROWS_PER_SHARD, count))]
        rows = [empty_row(schema) | {schema.key[0]: key, "shape": list(shape), "dtype": "bfloat16"} for key in keys]
        values = generator.integers(0, 1 << 14, len(rows) * int(np.prod(shape)), dtype=np.uint16)
        offsets = np.arange(len(rows) + 1, dtype=np.int32) * int(np.prod(shape))
        lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=tensor.type)
        table = pa.Table.from_pylist(rows, schema=pa.schema(schema.columns)).append_column(tensor, lists)
        stored.append(write_shard(shards_folder(folder), number, table.cast(schema.batch), schema))
    return pa.concat_tables(stored)


def anonymous_memory() -> int:
    """Return the anonymous resident memory of this process in bytes, or 0 where the system does not report it (macOS)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def read_steps(readers: tuple[ShardReader, ShardReader], count: int) -> Iterator[tuple[float, int]]:
    """Read the `count` rows of both readers in shuffled order; yield (seconds, anonymous memory in bytes) of every step."""
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


def check_samples(count: int, pixels: int, text_rows: int, features: int) -> dict[str, Any]:
    """Compute the checksums of `count` samples, and return one benchmark row: median seconds per sample, and its bytes.

    A sample is a latent of a square image of `pixels` and an embedding of (text_rows, features). All samples together are
    larger than the processor's caches if `count` is large.
    """
    generator = np.random.default_rng(0)
    shapes = ((128, pixels // 16, pixels // 16), (text_rows, features))
    samples = [[generator.integers(0, 1 << 14, shape, dtype=np.uint16) for shape in shapes] for _ in range(count)]
    seconds = []
    for sample in samples * 3:
        began = time.perf_counter()
        for values in sample:
            tensor_checksum(values)
        seconds.append(time.perf_counter() - began)
    size = sum(values.nbytes for values in samples[0])
    median = statistics.median(seconds)
    return {"sample_bytes": size, "rows": count, "s": median, "gb_per_s": size / median / 1e9}


@click.command()
@click.option("--gb", default=4.0, show_default=True, help="Size of both tables together, GB.")
@click.option("--pixels", default=1024, show_default=True, help="Side of the square images, pixels.")
@click.option("--features", default=7680, show_default=True, help="Width of an embedding; 7680 is klein 4B's.")
def main(gb: float, pixels: int, features: int) -> None:
    """Write synthetic tables, read them once, and print one JSON row."""
    import stages  # noqa: F401  (before mlx.core)

    sample_bytes = 2 * (128 * (pixels // 16) ** 2 + TEXT_ROWS * features)
    click.echo(json.dumps(read_epoch(int(gb * 1e9 / sample_bytes), pixels, TEXT_ROWS, features)))


if __name__ == "__main__":
    main()
