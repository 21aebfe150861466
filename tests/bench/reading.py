"""Measure what reading costs a training step: `python -m pipeline.bench_reading --gb 4`.

A synthetic project's latents and embeddings (random words, the true shapes of a family at one resolution) are written as
parts in a temporary folder, then read in shuffled order as training reads them: pages asked for one step ahead, one copy
into MLX. Prints one JSON row: milliseconds a step by itself (training hides them behind the device's work), and the
process's anonymous memory over the epoch, which must not grow with the table.
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

from pipeline.store.shards import PartReader, write_part
from schemas.table import TableSchema
from schemas.text_to_image.embeddings import EMBEDDINGS
from schemas.text_to_image.latents import LATENTS

ROWS_PER_PART = 8
TEXT_ROWS = 512


def blank(schema: TableSchema) -> dict[str, Any]:
    """A row's columns with nothing in them."""
    empty: dict[str, Any] = {"string": "", "bool": False, "float": 0.0, "double": 0.0, "int32": 0, "list<item: int32>": []}
    return {field.name: None if field.nullable else empty[str(field.type)] for field in schema.columns}


def fill(folder: Path, schema: TableSchema, shape: tuple[int, ...], count: int) -> pa.Table:
    """Write `count` rows of random words as parts; returns the index."""
    generator = np.random.default_rng(0)
    index = []
    for number, start in enumerate(range(0, count, ROWS_PER_PART), 1):
        rows = []
        for row in range(start, min(start + ROWS_PER_PART, count)):
            rows.append(blank(schema) | {schema.key[0]: f"{row:08d}", "shape": list(shape), "dtype": "bfloat16"})
        words = generator.integers(0, 1 << 14, len(rows) * int(np.prod(shape)), dtype=np.uint16)
        offsets = np.arange(len(rows) + 1, dtype=np.int32) * int(np.prod(shape))
        tensors = pa.ListArray.from_arrays(pa.array(offsets), pa.array(words), type=schema.batch.field("tensor").type)
        table = pa.Table.from_pylist(rows, schema=pa.schema(schema.columns)).append_column(schema.batch.field("tensor"), tensors)
        index.append(write_part(folder, number, table.cast(schema.batch), schema))
    return pa.concat_tables(index)


def anonymous() -> int:
    """The process's anonymous resident memory, bytes; 0 where the system does not say (macOS)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def epoch(latents: PartReader, embeddings: PartReader, count: int) -> Iterator[tuple[float, int]]:
    """(seconds, anonymous bytes) of every step of one shuffled epoch."""
    import mlx.core as mx

    order = [f"{row:08d}" for row in np.random.default_rng(1).permutation(count)]
    for step, key in enumerate(order):
        began = time.perf_counter()
        arrays = [mx.array(reader.read(key)).view(mx.bfloat16) for reader in (latents, embeddings)]
        mx.eval(arrays)
        for reader in (latents, embeddings):
            reader.ahead(order[step + 1 : step + 2])
        yield time.perf_counter() - began, anonymous()


def read_epoch(count: int, pixels: int, text_rows: int, features: int) -> dict[str, Any]:
    """Write tables of `count` samples, read them once in shuffled order: seconds a step and anonymous memory over the epoch."""
    shapes = {LATENTS: (128, pixels // 16, pixels // 16), EMBEDDINGS: (text_rows, features)}
    with tempfile.TemporaryDirectory(dir=os.environ.get("LATENTMILL_BENCH_FOLDER")) as scratch:
        readers = []
        for schema, shape in shapes.items():
            folder = Path(scratch) / schema.name
            folder.mkdir()
            readers.append(PartReader(folder, fill(folder, schema, shape, count), schema.key[0]))
        steps = list(epoch(readers[0], readers[1], count))
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


@click.command()
@click.option("--gb", default=4.0, show_default=True, help="Size of the two tables together.")
@click.option("--pixels", default=1024, show_default=True, help="Side of the images.")
@click.option("--features", default=7680, show_default=True, help="Width of an embedding; klein 4B has 7680.")
def main(gb: float, pixels: int, features: int) -> None:
    """Write synthetic tables, read them once, print one JSON row."""
    import stages  # noqa: F401  (before mlx.core)

    sample = 2 * (128 * (pixels // 16) ** 2 + TEXT_ROWS * features)
    click.echo(json.dumps(read_epoch(int(gb * 1e9 / sample), pixels, TEXT_ROWS, features)))


if __name__ == "__main__":
    main()
