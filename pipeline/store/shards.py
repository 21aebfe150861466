"""Tensors on disk: immutable, uncompressed Arrow files, and random reads from them by memory map.

A part holds whole rows as the stage yielded them, so that the index of a table can be rebuilt from its parts. Names
begin with a number that only grows: of two rows with one key, the one in the later part is the newer.
"""

from __future__ import annotations

import math
import mmap
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.disk import whole
from schemas.table import LOCATOR, TableSchema

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
    return _stored(rows.drop_columns(["tensor"]), path.name, _places(batches, start), schema)


def read_index(path: Path, schema: TableSchema) -> pa.Table:
    """The rows of a part as rows of `schema.stored`; its tensors are not read. ValueError if the file is no part."""
    start, batches = _mapped(path)
    for batch in batches:
        if batch.schema.names != schema.batch.names:
            raise ValueError(f"{path} is no part of {schema.name}: its columns are {', '.join(batch.schema.names)}; remove it")
    columns = [_copied(batch.drop_columns(["tensor"])) for batch in batches]
    return _stored(pa.Table.from_batches(columns, pa.schema(schema.columns)), path.name, _places(batches, start), schema)


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


def _places(batches: list[pa.RecordBatch], start: int) -> np.ndarray:
    """Where each tensor lies in its file: rows of (offset, length), bytes."""
    places = [np.zeros((0, 2), np.int64)]
    for batch in batches:
        tensors = batch.column("tensor")
        words = tensors.offsets.to_numpy().astype(np.int64)
        base = tensors.values.buffers()[1].address - start if words[-1] > words[0] else 0
        places.append(np.stack([base + 2 * words[:-1], 2 * np.diff(words)], axis=1))
    return np.concatenate(places)


def _copied(batch: pa.RecordBatch) -> pa.RecordBatch:
    # A column of a mapped file keeps the whole file mapped for as long as anyone has it.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as out:
        out.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def _stored(rows: pa.Table, part: str, places: np.ndarray, schema: TableSchema) -> pa.Table:
    columns = [pa.array([part] * rows.num_rows, pa.string()), pa.array(places[:, 0]), pa.array(places[:, 1])]
    for field, values in zip(LOCATOR, columns, strict=True):
        rows = rows.append_column(field, values)
    return rows.cast(schema.stored)


class ShardReader:
    """The tensors of a table's rows. The kernel reads only what is asked for, and lets go of what was read before.

    ValueError in one line if a part that the rows need is missing or too short.
    """

    def __init__(self, folder: Path, rows: pa.Table, key: str) -> None:
        self._folder = folder
        self._row = {name: row for row, name in enumerate(rows[key].to_pylist())}
        parts = rows["part"].combine_chunks().dictionary_encode()
        self._names: list[str] = parts.dictionary.to_pylist()
        self._part = parts.indices.to_numpy()
        self._start = rows["byte_offset"].to_numpy()
        self._bytes = rows["nbytes"].to_numpy()
        self._shapes = rows["shape"].combine_chunks()
        self._maps: dict[str, mmap.mmap] = {}
        self._read: set[int] = set()
        self._check(rows)

    def read(self, key: str) -> np.ndarray:
        """The tensor of that row in its shape, uint16 words: a read-only view of the file that holds until the next `ahead`."""
        row = self._row[key]
        count = int(self._bytes[row]) // 2
        if not count:
            raise ValueError(f"{self._folder.parent}: row {key} has no tensor; see its column `rejected`")
        self._read.add(row)
        flat = np.frombuffer(self._map(row), np.uint16, count, int(self._start[row]))
        return flat.reshape(self._shapes[row].as_py())

    def ahead(self, keys: Iterable[str]) -> None:
        """Ask for the pages of the rows that come next; let go of those read before."""
        for row in self._read:
            if self._names[self._part[row]] in self._maps:
                self._advise(row, "MADV_DONTNEED")
        self._read.clear()
        for key in keys:
            self._advise(self._row[key], "MADV_WILLNEED")

    def close(self) -> None:
        """Let go of every map; views that are still held stay valid."""
        self._read.clear()
        self._maps.clear()

    def _check(self, rows: pa.Table) -> None:
        ends = pc.add(rows["byte_offset"], rows["nbytes"])
        needed = pa.table({"part": rows["part"], "end": ends}).group_by("part").aggregate([("end", "max")])
        for name, end in zip(needed["part"].to_pylist(), needed["end_max"].to_pylist(), strict=True):
            if wrong := damage(self._folder / name, end):
                raise ValueError(f"{self._folder / name} {wrong}; run the stage again to make its rows anew")

    def _map(self, row: int) -> mmap.mmap:
        name = self._names[self._part[row]]
        found = self._maps.pop(name, None)
        if found is None:
            with (self._folder / name).open("rb") as file:
                found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if hasattr(mmap, "MADV_RANDOM"):  # or every fault reads megabytes ahead
                with suppress(OSError):
                    found.madvise(mmap.MADV_RANDOM)
        self._maps[name] = found  # at the end: those not used for long go first
        while len(self._maps) > MAPPED_SHARDS:
            del self._maps[next(iter(self._maps))]  # a view that is still held keeps its own map
        return found

    def _advise(self, row: int, hint: str) -> None:
        if not hasattr(mmap, hint) or not self._bytes[row]:
            return
        held = self._map(row)
        first = int(self._start[row]) // mmap.PAGESIZE * mmap.PAGESIZE
        length = math.ceil((int(self._start[row]) + int(self._bytes[row]) - first) / mmap.PAGESIZE) * mmap.PAGESIZE
        with suppress(OSError):  # a hint and no more
            held.madvise(getattr(mmap, hint), first, min(length, len(held) - first))
