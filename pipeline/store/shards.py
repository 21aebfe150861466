"""Shards: immutable, uncompressed Arrow files that hold whole rows, tensors included, and random access to the tensors.

The index of a table can be rebuilt from its shards. A shard's name begins with a number that only grows: of two rows with
the same key, the row in the shard with the larger number is the newer one.
"""

from __future__ import annotations

import functools
import itertools
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

from pipeline.store.checksums import Checksums, tensor_checksum
from pipeline.store.disk import atomic_write, stamp
from schemas.table import TableSchema

SHARD_BYTES = 64 << 20  # tensor bytes in a shard; 100k latents at 1024 px make 1,563 files
ROWS_PER_BATCH = 64  # DuckDB is twenty times slower on batches of one row
INDEX_COLUMN_BYTES = 345  # of each column of a table's index in Lance, besides its values; about
MAGIC = b"ARROW1"  # first and last bytes of an Arrow file
MAPPED_SHARDS = 64  # shards kept open; macOS allows a process 256 open files


def shard_files(folder: Path) -> list[Path]:
    # Not those that begin with a dot: temporary folders of killed processes also end in .arrow.
    return sorted(folder.glob("[!.]*.arrow"))


def shard_number(name: str) -> int:
    """12 for "00000012-ab.arrow"; 0 if the name starts with no number."""
    head = name.split("-", 1)[0]
    return int(head) if head.isdigit() else 0


def write_shard(table: Path, rows: pa.Table, schema: TableSchema) -> pa.Table:
    """Write rows with tensors to a new shard, and return them as the index stores them; checksums that they have stay."""
    for tensor in schema.tensors:
        if tensor.checksum not in rows.column_names:  # to compute those of moved rows again would hide damage
            values = [
                tensor_checksum(lists.values.to_numpy()[start:stop])
                for lists in rows[tensor.name].chunks
                for start, stop in itertools.pairwise(lists.offsets.to_numpy())
            ]
            rows = rows.append_column(tensor.checksum_field, pa.array(values, pa.int64()))
    rows = rows.select(schema.shard.names).cast(schema.shard)
    folder = table / "shards"
    number = 1 + max((shard_number(path.name) for path in shard_files(folder)), default=0)
    path = folder / f"{number:08d}-{secrets.token_hex(4)}.arrow"  # a new name: readers may still have an old file open
    with atomic_write(path) as temporary:
        with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, schema.shard) as out:
            for start in range(0, rows.num_rows, ROWS_PER_BATCH):
                out.write_table(rows.slice(start, ROWS_PER_BATCH).combine_chunks())
        Checksums(table).record({f"shards/{path.name}": temporary})
        address, batches = _map_batches(temporary)
    return _with_locators(rows, path.name, batches, address, schema)


def rows_per_shard(rows: pa.Table, schema: TableSchema, shard_bytes: int) -> int:
    """How many of the first rows fill one shard; at least 1, and all rows of a table without tensors."""
    if not schema.tensors:
        return int(rows.num_rows)
    sizes = [tensor.kind.byte_width * pc.list_value_length(rows[tensor.name]).to_numpy() for tensor in schema.tensors]
    ends = np.cumsum(np.sum(sizes, axis=0), dtype=np.int64)
    return max(1, int(np.searchsorted(ends, shard_bytes, "right")))


def overhead_bytes(schema: TableSchema, rows: pa.Table, tensors: int) -> int:
    """Estimated bytes on disk besides `tensors` bytes of tensors; exact for shards of equally many rows, rough for the index."""
    if not rows.num_rows:
        return 0
    files = max(1, math.ceil(tensors / SHARD_BYTES))
    batches = files * math.ceil(rows.num_rows / files / ROWS_PER_BATCH)
    sample = _without_tensors(schema, rows.slice(0, ROWS_PER_BATCH))
    nothing, one, many = (_file_bytes(sample.slice(0, count)) for count in (0, 1, sample.num_rows))
    row_bytes = (many - one) / max(1, sample.num_rows - 1)
    shards = files * nothing + batches * (one - nothing - row_bytes) + rows.num_rows * row_bytes
    index = INDEX_COLUMN_BYTES * len(schema.stored) + rows.num_rows * row_bytes  # most columns compress little
    return int(shards + index)


def _without_tensors(schema: TableSchema, rows: pa.Table) -> pa.Table:
    tensors = {tensor.name for tensor in schema.tensors}
    columns = []
    for field in schema.shard:
        if field.name in rows.column_names:
            columns.append(rows[field.name].cast(field.type).combine_chunks())
        elif field.nullable:
            columns.append(pa.nulls(rows.num_rows, field.type))
        else:
            lists: list[int] = [] if field.name in tensors else [0, 0]
            value = lists if pa.types.is_list(field.type) else "" if field.type == pa.string() else 0
            columns.append(pa.array([value] * rows.num_rows).cast(field.type))
    return pa.Table.from_arrays(columns, schema=schema.shard)


def _file_bytes(rows: pa.Table) -> int:
    sink = pa.MockOutputStream()
    with pa.ipc.new_file(sink, rows.schema) as out:
        out.write_table(rows.combine_chunks())
    return int(sink.size())


def read_shard_index(path: Path, schema: TableSchema) -> pa.Table:
    """Rows of a shard without tensors (`schema.stored`), copied. Raises ValueError if it has the columns of another table."""
    address, batches = _map_batches(path)
    for batch in batches:
        if batch.schema.names != schema.shard.names:
            columns = ", ".join(batch.schema.names)
            raise ValueError(f"{path} is not a shard of {schema.name}: its columns are {columns}; remove the file")
    names = [tensor.name for tensor in schema.tensors]
    kept = pa.schema([field for field in schema.shard if field.name not in names])
    copied = [pa.Table.from_batches([_copy(batch.drop_columns(names))]).cast(kept) for batch in batches]
    return _with_locators(pa.concat_tables([kept.empty_table(), *copied]), path.name, batches, address, schema)


def read_shard_rows(path: Path, positions: Iterable[int]) -> pa.Table:
    _, batches = _map_batches(path)
    return pa.Table.from_batches(batches).take(pa.array(positions, pa.int64()))


def shard_damage(path: Path, needed: int) -> str:
    """Such as "is missing"; "" if whole. `needed`: bytes that the file must have at least to hold its rows."""
    try:
        size = stamp(path)[0]
        with path.open("rb") as file:
            file.seek(max(0, size - len(MAGIC)))
            complete = file.read() == MAGIC
    except FileNotFoundError:
        return "is no regular file" if path.exists() else "is missing"
    if size < needed or not complete:
        return f"is cut short: it has {size} bytes, but its rows need more than {needed}"
    return ""


def damaged_shards(rows: pa.Table, shards: Path, schema: TableSchema) -> dict[str, str]:
    """Shards of `rows` that are missing or cut short -> what is wrong; only the size and the last bytes are checked."""
    # Offset at which the last tensor of each row ends in its shard.
    ends = [pc.add(rows[tensor.offset], rows[tensor.nbytes]) for tensor in schema.tensors]
    last = ends[0] if len(ends) == 1 else pc.max_element_wise(*ends)
    largest = rows.select(["shard"]).append_column("end", last).group_by("shard").aggregate([("end", "max")])
    needed = zip(largest["shard"].to_pylist(), largest["end_max"].to_pylist(), strict=True)
    return {name: damage for name, end in needed if (damage := shard_damage(shards / name, end))}


def tensor_bytes(rows: pa.Table, schema: TableSchema) -> pa.ChunkedArray:
    return functools.reduce(pc.add, (rows[tensor.nbytes] for tensor in schema.tensors))


def _map_batches(path: Path) -> tuple[int, list[pa.RecordBatch]]:
    with pa.memory_map(str(path)) as file:
        content = file.read_buffer()
    reader = pa.ipc.open_file(content)
    # The address of the file's first byte turns addresses of values into offsets.
    return content.address, [reader.get_batch(index) for index in range(reader.num_record_batches)]


def _copy(batch: pa.RecordBatch) -> pa.RecordBatch:
    # Any column of a mapped batch would keep the whole file mapped.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as out:
        out.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def _with_locators(rows: pa.Table, shard: str, batches: list[pa.RecordBatch], address: int, schema: TableSchema) -> pa.Table:
    """`rows` with their place in the shard, whose first byte lies at `address` and whose batches include the tensors."""
    rows = rows.append_column("shard", pa.array([shard] * rows.num_rows, pa.string()))
    for tensor in schema.tensors:
        size, offsets, lengths = tensor.kind.byte_width, [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for batch in batches:
            lists = batch.column(tensor.name)
            bounds = lists.offsets.to_numpy().astype(np.int64)
            start = lists.values.buffers()[1].address - address if bounds[-1] > bounds[0] else 0
            offsets.append(start + size * bounds[:-1])
            lengths.append(size * np.diff(bounds))
        rows = rows.append_column(tensor.offset, pa.array(np.concatenate(offsets)))
        rows = rows.append_column(tensor.nbytes, pa.array(np.concatenate(lengths)))
    return rows.select(schema.stored.names).cast(schema.stored)


@dataclass(frozen=True)
class _Locators:
    """Where the values of one tensor column lie in the shards; arrays have one entry per row."""

    dtype: np.dtype
    offset: np.ndarray  # in the shard, bytes
    nbytes: np.ndarray
    shape_ends: np.ndarray  # in `sizes`, one more than there are rows
    sizes: np.ndarray
    checksum: np.ndarray


class ShardReader:
    """Tensors of `rows`, which come from `TableFolder.rows`. Raises ValueError if a shard of them is missing or cut short."""

    def __init__(self, table: Path, rows: pa.Table, schema: TableSchema) -> None:
        self._table, self._name = table, schema.name
        self._row = {key: row for row, key in enumerate(rows[schema.key[0]].to_pylist())}
        shards = rows["shard"].combine_chunks().dictionary_encode()
        self._shards: list[str] = shards.dictionary.to_pylist()
        self._shard = shards.indices.to_numpy()
        self._tensors = {
            tensor.name: _Locators(
                pa.nulls(0, tensor.kind).to_numpy(zero_copy_only=False).dtype,
                rows[tensor.offset].to_numpy(),
                rows[tensor.nbytes].to_numpy(),
                (shapes := rows[tensor.shape].combine_chunks()).offsets.to_numpy(),
                shapes.values.to_numpy(),
                rows[tensor.checksum].to_numpy(),
            )
            for tensor in schema.tensors
        }
        self._first = schema.tensors[0].name
        self._maps: dict[str, mmap.mmap] = {}  # the least recently used first
        self._read: set[int] = set()
        for name, damage in damaged_shards(rows, table / "shards", schema).items():
            raise ValueError(f"{schema.name}: {table / 'shards' / name} {damage}; run: latentmill verify --repair")

    def read(self, key: str, name: str = "") -> np.ndarray:
        """A read-only view of the file, to be used until the next `ahead`. 16-bit floats come as the same bits in uint16.

        Raises ValueError if the row has no tensor or its values differ from the checksum, KeyError for no such row or column.
        """
        found, row = self.view(key, name), self._row[key]
        if tensor_checksum(found) != self._tensors[name or self._first].checksum[row]:
            shard = self._table / "shards" / self._shards[self._shard[row]]
            raise ValueError(
                f"{self._name}: the tensor of row {key} in {shard} differs from its checksum; run: latentmill verify --repair"
            )
        return found

    def view(self, key: str, name: str = "") -> np.ndarray:
        """As `read`, without the comparison with the checksum."""
        row, tensor = self._row[key], self._tensors[name or self._first]
        count = int(tensor.nbytes[row]) // tensor.dtype.itemsize
        if not count:
            raise ValueError(f"{self._table}: row {key} has no tensor; its column `rejected` says why")
        self._read.add(row)
        flat = np.frombuffer(self._map(row), tensor.dtype, count, int(tensor.offset[row]))
        return flat.reshape(tensor.sizes[tensor.shape_ends[row] : tensor.shape_ends[row + 1]].tolist())

    def ahead(self, keys: Iterable[str]) -> None:
        """Start reading the tensors of `keys`, and release those read before, whose arrays become invalid."""
        # It is only page cache, but shows as memory of the process: 4.1 GB after an epoch over 4 GiB.
        for row in self._read:
            if self._shards[self._shard[row]] in self._maps:
                self._advise(row, "MADV_DONTNEED")
        self._read.clear()
        for key in keys:
            self._advise(self._row[key], "MADV_WILLNEED")

    def _map(self, row: int) -> mmap.mmap:
        name = self._shards[self._shard[row]]
        mapped = self._maps.pop(name, None)
        if mapped is None:
            with (self._table / "shards" / name).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            # Cold rows of 1 MiB: 253 MB/s and 4.8 times the bytes with neither, 39 with this, 803 with MADV_WILLNEED too.
            if hasattr(mmap, "MADV_RANDOM"):  # without it every page fault reads megabytes ahead
                with suppress(OSError):
                    mapped.madvise(mmap.MADV_RANDOM)
        self._maps[name] = mapped
        while len(self._maps) > MAPPED_SHARDS:
            del self._maps[next(iter(self._maps))]  # a view that is still in use keeps its own map
        return mapped

    def _advise(self, row: int, hint: str) -> None:
        if not hasattr(mmap, hint):
            return
        for tensor in self._tensors.values():
            start, size = int(tensor.offset[row]), int(tensor.nbytes[row])
            if not size:
                continue
            mapped = self._map(row)
            # madvise takes whole pages.
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            length = math.ceil((start + size - first) / mmap.PAGESIZE) * mmap.PAGESIZE
            with suppress(OSError):  # only a hint
                mapped.madvise(getattr(mmap, hint), first, min(length, len(mapped) - first))
