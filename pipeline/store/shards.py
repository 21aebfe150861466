"""Tensors on disk: immutable, uncompressed Arrow files, and random reads from them by memory map.

A part holds whole rows as the stage yielded them, so that the index of a table can be rebuilt from its parts. Names
begin with a number that only grows: of two rows with one key, the one in the later part is the newer.
"""

from __future__ import annotations

import functools
import math
import mmap
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.disk import whole
from schemas.table import TableSchema, TensorColumn

SHARD_BYTES = 64 << 20  # a kill costs at most so much work; 100k latents at 1024 px make 1,563 files
ROWS_PER_BATCH = 64  # DuckDB slows twentyfold on batches of one row
MAPPED_SHARDS = 64  # maps kept open: macOS grants 256 open files
MAGIC = b"ARROW1"  # an Arrow file begins and ends with it


def number_of(name: str) -> int:
    """The place of a part in the order of writing."""
    head = name.split("-", 1)[0]
    return int(head) if head.isdigit() else 0


def next_number(folder: Path) -> int:
    """The number of the part that is written next."""
    return 1 + max((number_of(path.name) for path in folder.glob("*.arrow")), default=0)


def write_shard(folder: Path, number: int, rows: pa.Table, schema: TableSchema) -> pa.Table:
    """Write rows of `schema.batch` as one part; returns them as rows of `schema.stored`."""
    path = folder / f"{number:08d}-{secrets.token_hex(4)}.arrow"  # never a name that a reader may still have open
    with whole(path) as temporary:
        with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, schema.batch) as out:
            for start in range(0, rows.num_rows, ROWS_PER_BATCH):
                out.write_table(rows.slice(start, ROWS_PER_BATCH).combine_chunks())
        start, batches = _mapped(temporary)
    names = [tensor.name for tensor in schema.tensors]
    return _stored(rows.drop_columns(names), path.name, _places(batches, start, schema), schema)


def read_index(path: Path, schema: TableSchema) -> pa.Table:
    """The rows of a part as rows of `schema.stored`; its tensors are not read. ValueError if the file is no part."""
    start, batches = _mapped(path)
    for batch in batches:
        if batch.schema.names != schema.batch.names:
            raise ValueError(f"{path} is no part of {schema.name}: its columns are {', '.join(batch.schema.names)}; remove it")
    names = [tensor.name for tensor in schema.tensors]
    columns = [_copied(batch.drop_columns(names)) for batch in batches]
    return _stored(pa.Table.from_batches(columns, pa.schema(schema.columns)), path.name, _places(batches, start, schema), schema)


def read_rows(path: Path, rows: Iterable[int]) -> pa.Table:
    """Some rows of a part, by number, tensors included, in memory of their own."""
    _, batches = _mapped(path)
    return pa.Table.from_batches(batches).take(pa.array(rows, pa.int64()))


def damage(path: Path, needed: int) -> str:
    """What is wrong with a part of which `needed` bytes are asked for, in words; empty if nothing is."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - len(MAGIC)))
            ends = file.read() == MAGIC
    except FileNotFoundError:
        return "is missing"
    if size < needed or not ends:
        return f"is cut short: it has {size} bytes, its rows need more than {needed}"
    return ""


def _mapped(path: Path) -> tuple[int, list[pa.RecordBatch]]:
    """The batches of a part without reading them, and the address at which the file begins in memory."""
    with pa.memory_map(str(path)) as file:
        content = file.read_buffer()
    reader = pa.ipc.open_file(content)
    return content.address, [reader.get_batch(index) for index in range(reader.num_record_batches)]


def _places(batches: list[pa.RecordBatch], start: int, schema: TableSchema) -> dict[str, np.ndarray]:
    """For each tensor of the schema where its values lie in the file: rows of (offset, length), bytes."""
    return {tensor.name: _places_of(tensor, batches, start) for tensor in schema.tensors}


def _places_of(tensor: TensorColumn, batches: list[pa.RecordBatch], start: int) -> np.ndarray:
    size = tensor.kind.byte_width
    places = [np.zeros((0, 2), np.int64)]
    for batch in batches:
        lists = batch.column(tensor.name)
        values = lists.offsets.to_numpy().astype(np.int64)
        base = lists.values.buffers()[1].address - start if values[-1] > values[0] else 0
        places.append(np.stack([base + size * values[:-1], size * np.diff(values)], axis=1))
    return np.concatenate(places)


def _copied(batch: pa.RecordBatch) -> pa.RecordBatch:
    # A column of a mapped file keeps the whole file mapped for as long as anyone has it.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as out:
        out.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def _stored(rows: pa.Table, shard: str, places: dict[str, np.ndarray], schema: TableSchema) -> pa.Table:
    """The rows with their locator: the shard, and offset and bytes of every tensor."""
    columns = [pa.array([shard] * rows.num_rows, pa.string())]
    columns += [pa.array(places[tensor.name][:, side]) for tensor in schema.tensors for side in (0, 1)]
    for field, values in zip(schema.locator, columns, strict=True):
        rows = rows.append_column(field, values)
    return rows.cast(schema.stored)


def row_bytes(rows: pa.Table, schema: TableSchema) -> pa.ChunkedArray:
    """For each stored row the bytes of all its tensors."""
    return functools.reduce(pc.add, (rows[tensor.nbytes] for tensor in schema.tensors))


def row_ends(rows: pa.Table, schema: TableSchema) -> pa.ChunkedArray:
    """For each stored row where its last tensor ends in the shard, bytes."""
    ends = [pc.add(rows[tensor.offset], rows[tensor.nbytes]) for tensor in schema.tensors]
    return ends[0] if len(ends) == 1 else pc.max_element_wise(*ends)


@dataclass(frozen=True)
class _Places:
    """Where one tensor of every row lies: offset and size in bytes, shape."""

    dtype: np.dtype
    offset: np.ndarray
    nbytes: np.ndarray
    shapes: pa.Array


class ShardReader:
    """Reads the tensors of a table's rows by memory map. Pages are read on access and released by `ahead`.

    ValueError, in one line, if a shard that the rows need is missing or too short.
    """

    def __init__(self, folder: Path, rows: pa.Table, schema: TableSchema) -> None:
        self._folder = folder
        self._row = {name: row for row, name in enumerate(rows[schema.key[0]].to_pylist())}
        shards = rows["shard"].combine_chunks().dictionary_encode()
        self._names: list[str] = shards.dictionary.to_pylist()
        self._shard = shards.indices.to_numpy()
        self._tensors = {tensor.name: _places_in(rows, tensor) for tensor in schema.tensors}
        self._first = schema.tensors[0].name
        self._maps: dict[str, mmap.mmap] = {}
        self._read: set[int] = set()
        self._check(rows, schema)

    def read(self, key: str, name: str = "") -> np.ndarray:
        """The tensor called `name` (empty: the first) of the row with that key, in its shape.

        A read-only view of the file that is valid until the next call of `ahead`. KeyError for an unknown key.
        """
        row, tensor = self._row[key], self._tensors[name or self._first]
        count = int(tensor.nbytes[row]) // tensor.dtype.itemsize
        if not count:
            raise ValueError(f"{self._folder.parent}: row {key} has no tensor; see its column `rejected`")
        self._read.add(row)
        flat = np.frombuffer(self._map(row), tensor.dtype, count, int(tensor.offset[row]))
        return flat.reshape(tensor.shapes[row].as_py())

    def ahead(self, keys: Iterable[str]) -> None:
        """Prefetch the pages of the rows with these keys; release those of the rows read before."""
        for row in self._read:
            if self._names[self._shard[row]] in self._maps:
                self._advise(row, "MADV_DONTNEED")
        self._read.clear()
        for key in keys:
            self._advise(self._row[key], "MADV_WILLNEED")

    def _check(self, rows: pa.Table, schema: TableSchema) -> None:
        ends = pa.table({"shard": rows["shard"], "end": row_ends(rows, schema)})
        needed = ends.group_by("shard").aggregate([("end", "max")])
        for name, end in zip(needed["shard"].to_pylist(), needed["end_max"].to_pylist(), strict=True):
            if wrong := damage(self._folder / name, end):
                raise ValueError(f"{self._folder / name} {wrong}; run the stage again to recompute its rows")

    def _map(self, row: int) -> mmap.mmap:
        name = self._names[self._shard[row]]
        found = self._maps.pop(name, None)
        if found is None:
            with (self._folder / name).open("rb") as file:
                found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if hasattr(mmap, "MADV_RANDOM"):  # without it every page fault reads megabytes ahead
                with suppress(OSError):
                    found.madvise(mmap.MADV_RANDOM)
        self._maps[name] = found  # last in the dict: the least recently used are closed first
        while len(self._maps) > MAPPED_SHARDS:
            del self._maps[next(iter(self._maps))]  # a view that is still in use keeps its own map
        return found

    def _advise(self, row: int, hint: str) -> None:
        if not hasattr(mmap, hint):
            return
        for tensor in self._tensors.values():
            start, size = int(tensor.offset[row]), int(tensor.nbytes[row])
            if not size:
                continue
            held = self._map(row)
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            length = math.ceil((start + size - first) / mmap.PAGESIZE) * mmap.PAGESIZE
            with suppress(OSError):  # only a hint
                held.madvise(getattr(mmap, hint), first, min(length, len(held) - first))


def _places_in(rows: pa.Table, tensor: TensorColumn) -> _Places:
    dtype = np.dtype(tensor.kind.to_pandas_dtype())
    offset, nbytes = rows[tensor.offset].to_numpy(), rows[tensor.nbytes].to_numpy()
    return _Places(dtype, offset, nbytes, rows[tensor.shape].combine_chunks())
