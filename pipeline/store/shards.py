"""Shard files: immutable, uncompressed Arrow files that hold whole rows, tensors included.

The index of a table can be rebuilt from its shards. A shard's name begins with a number that only grows: of two rows with
the same key, the row in the shard with the larger number is the newer one.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.disk import atomic_write
from schemas.renames import FOLDERS
from schemas.table import TableSchema, TensorColumn

SHARD_BYTES = 64 << 20  # tensor bytes in a shard; 100k latents at 1024 px make 1,563 files
ROWS_PER_BATCH = 64  # DuckDB is twenty times slower on batches of one row
MAGIC = b"ARROW1"  # first and last bytes of an Arrow file


def shards_folder(table: Path) -> Path:
    """The folder of a table's shards: TABLE/shards, or its old name where an earlier version wrote the table."""
    folder = table / "shards"
    old = (table / name for name, new in FOLDERS.items() if new == folder.name)
    return folder if folder.exists() else next((path for path in old if path.is_dir()), folder)


def shard_number(name: str) -> int:
    """The number at the start of a shard's file name; 0 if there is none."""
    head = name.split("-", 1)[0]
    return int(head) if head.isdigit() else 0


def next_shard_number(folder: Path) -> int:
    """One more than the largest number of a shard in the folder."""
    return 1 + max((shard_number(path.name) for path in folder.glob("*.arrow")), default=0)


def write_shard(folder: Path, number: int, rows: pa.Table, schema: TableSchema) -> pa.Table:
    """Write rows of `schema.batch` as the shard with that number. Returns its rows of `schema.stored`."""
    path = folder / f"{number:08d}-{secrets.token_hex(4)}.arrow"  # a new name: readers may still have an old file open
    with atomic_write(path) as temporary:
        with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, schema.batch) as out:
            for start in range(0, rows.num_rows, ROWS_PER_BATCH):
                out.write_table(rows.slice(start, ROWS_PER_BATCH).combine_chunks())
        address, batches = _map_batches(temporary)
    names = [tensor.name for tensor in schema.tensors]
    return _with_locators(rows.drop_columns(names), path.name, _locators(batches, address, schema), schema)


def read_shard_index(path: Path, schema: TableSchema) -> pa.Table:
    """The rows of a shard as `schema.stored`, in memory of their own. Tensors are not read.

    ValueError if the columns of the file are not those of `schema.batch`.
    """
    address, batches = _map_batches(path)
    for batch in batches:
        if batch.schema.names != schema.batch.names:
            columns = ", ".join(batch.schema.names)
            raise ValueError(f"{path} is not a shard of {schema.name}: its columns are {columns}; remove the file")
    names = [tensor.name for tensor in schema.tensors]
    rows = pa.Table.from_batches([_copy(batch.drop_columns(names)) for batch in batches], pa.schema(schema.columns))
    return _with_locators(rows, path.name, _locators(batches, address, schema), schema)


def read_shard_rows(path: Path, positions: Iterable[int]) -> pa.Table:
    """The rows of a shard at these 0-based positions as `schema.batch`, tensors included, in memory of their own."""
    _, batches = _map_batches(path)
    return pa.Table.from_batches(batches).take(pa.array(positions, pa.int64()))


def shard_damage(path: Path, needed: int) -> str:
    """What is wrong with a shard whose rows need its first `needed` bytes, in words ("is missing"); "" if it is whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - len(MAGIC)))
            complete = file.read() == MAGIC
    except FileNotFoundError:
        return "is missing"
    if size < needed or not complete:
        return f"is cut short: it has {size} bytes, its rows need more than {needed}"
    return ""


def tensor_bytes(rows: pa.Table, schema: TableSchema) -> pa.ChunkedArray:
    """For each row of `schema.stored`, the size of all its tensors in bytes."""
    return functools.reduce(pc.add, (rows[tensor.nbytes] for tensor in schema.tensors))


def tensor_ends(rows: pa.Table, schema: TableSchema) -> pa.ChunkedArray:
    """For each row of `schema.stored`, the byte of its shard at which its last tensor ends."""
    ends = [pc.add(rows[tensor.offset], rows[tensor.nbytes]) for tensor in schema.tensors]
    return ends[0] if len(ends) == 1 else pc.max_element_wise(*ends)


def _map_batches(path: Path) -> tuple[int, list[pa.RecordBatch]]:
    """The memory address at which the mapped file begins, and its batches, of which nothing is read yet."""
    with pa.memory_map(str(path)) as file:
        content = file.read_buffer()
    reader = pa.ipc.open_file(content)
    return content.address, [reader.get_batch(index) for index in range(reader.num_record_batches)]


def _locators(batches: list[pa.RecordBatch], address: int, schema: TableSchema) -> dict[str, np.ndarray]:
    """For each tensor column an int64 array (rows, 2): offset in the file and length of the row's values, bytes."""
    return {tensor.name: _locate(tensor, batches, address) for tensor in schema.tensors}


def _locate(tensor: TensorColumn, batches: list[pa.RecordBatch], address: int) -> np.ndarray:
    size = tensor.kind.byte_width
    found = [np.zeros((0, 2), np.int64)]
    for batch in batches:
        lists = batch.column(tensor.name)
        bounds = lists.offsets.to_numpy().astype(np.int64)
        start = lists.values.buffers()[1].address - address if bounds[-1] > bounds[0] else 0
        found.append(np.stack([start + size * bounds[:-1], size * np.diff(bounds)], axis=1))
    return np.concatenate(found)


def _copy(batch: pa.RecordBatch) -> pa.RecordBatch:
    # Any column of a mapped batch would keep the whole file mapped.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as out:
        out.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def _with_locators(rows: pa.Table, shard: str, locators: dict[str, np.ndarray], schema: TableSchema) -> pa.Table:
    columns = [pa.array([shard] * rows.num_rows, pa.string())]
    columns += [pa.array(locators[tensor.name][:, side]) for tensor in schema.tensors for side in (0, 1)]
    for field, values in zip(schema.locator, columns, strict=True):
        rows = rows.append_column(field, values)
    return rows.cast(schema.stored)
