"""Shard files: immutable, uncompressed Arrow files that hold whole rows, tensors included.

The index of a table can be rebuilt from its shards. A shard's name begins with a number that only grows: of two rows with
the same key, the row in the shard with the larger number is the newer one.
"""

from __future__ import annotations

import functools
import itertools
import math
import secrets
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.checksums import tensor_checksum
from pipeline.store.disk import atomic_write
from schemas.renames import FOLDERS
from schemas.table import TableSchema, TensorColumn

SHARD_BYTES = 64 << 20  # tensor bytes in a shard; 100k latents at 1024 px make 1,563 files
ROWS_PER_BATCH = 64  # DuckDB is twenty times slower on batches of one row
INDEX_COLUMN_BYTES = 345  # of each column of a table's index in Lance, besides its values; about
MAGIC = b"ARROW1"  # first and last bytes of an Arrow file


def shards_folder(table: Path) -> Path:
    """TABLE/shards, or the name that an earlier release gave the folder."""
    folder = table / "shards"
    old = (table / name for name, new in FOLDERS.items() if new == folder.name)
    return folder if folder.exists() else next((path for path in old if path.is_dir()), folder)


def shard_files(folder: Path) -> list[Path]:
    # Not those that begin with a dot: temporary folders of killed processes also end in .arrow.
    return sorted(folder.glob("[!.]*.arrow"))


def shard_number(name: str) -> int:
    """12 for "00000012-ab.arrow"; 0 if the name starts with no number."""
    head = name.split("-", 1)[0]
    return int(head) if head.isdigit() else 0


def next_shard_number(folder: Path) -> int:
    return 1 + max((shard_number(path.name) for path in shard_files(folder)), default=0)


def write_shard(folder: Path, number: int, rows: pa.Table, schema: TableSchema) -> pa.Table:
    """Write rows with tensors to a new shard. Returns them as the index stores them (`schema.stored`)."""
    rows = _with_checksums(rows, schema)
    path = folder / f"{number:08d}-{secrets.token_hex(4)}.arrow"  # a new name: readers may still have an old file open
    with atomic_write(path) as temporary:
        with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, schema.shard) as out:
            for start in range(0, rows.num_rows, ROWS_PER_BATCH):
                out.write_table(rows.slice(start, ROWS_PER_BATCH).combine_chunks())
        address, batches = _map_batches(temporary)
    names = [tensor.name for tensor in schema.tensors]
    return _with_locators(rows.drop_columns(names), path.name, _locators(batches, address, schema), schema)


def _with_checksums(rows: pa.Table, schema: TableSchema) -> pa.Table:
    for tensor in schema.tensors:
        if tensor.checksum not in rows.column_names:
            rows = rows.append_column(tensor.checksum_field, pa.nulls(rows.num_rows, pa.int64()))
        known = rows[tensor.checksum]
        # Only missing ones: to compute the others again would hide damage.
        if known.null_count:
            computed = [checksum for lists in rows[tensor.name].chunks for checksum in tensor_checksums(lists)]
            known = pc.coalesce(known, pa.array(computed, pa.int64()))
        rows = rows.set_column(rows.schema.get_field_index(tensor.checksum), tensor.checksum_field, known)
    return rows.select(schema.shard.names).cast(schema.shard)


def tensor_checksums(lists: pa.ListArray) -> list[int]:
    values, bounds = lists.values.to_numpy(), lists.offsets.to_numpy()
    return [tensor_checksum(values[start:stop]) for start, stop in itertools.pairwise(bounds)]


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
        elif field.nullable and field.type != pa.int64():  # checksums are never null in new files
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
        if batch.schema.names not in (schema.shard.names, schema.batch.names):  # an earlier version wrote no checksums
            columns = ", ".join(batch.schema.names)
            raise ValueError(f"{path} is not a shard of {schema.name}: its columns are {columns}; remove the file")
    names = [tensor.name for tensor in schema.tensors]
    kept = pa.schema([field for field in schema.shard if field.name not in names])
    copied = [_copy(batch.drop_columns(names)) for batch in batches]
    rows = pa.concat_tables([kept.empty_table(), *map(_as_table, copied)], promote_options="default").cast(kept)
    return _with_locators(rows, path.name, _locators(batches, address, schema), schema)


def read_shard_rows(path: Path, positions: Iterable[int]) -> pa.Table:
    _, batches = _map_batches(path)
    return pa.Table.from_batches(batches).take(pa.array(positions, pa.int64()))


def shard_damage(path: Path, needed: int) -> str:
    """Such as "is missing"; "" if whole. `needed`: bytes that the file must have at least to hold its rows."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - len(MAGIC)))
            complete = file.read() == MAGIC
    except FileNotFoundError:
        return "is missing"
    if size < needed or not complete:
        return f"is cut short: it has {size} bytes, but its rows need more than {needed}"
    return ""


def tensor_bytes(rows: pa.Table, schema: TableSchema) -> pa.ChunkedArray:
    return functools.reduce(pc.add, (rows[tensor.nbytes] for tensor in schema.tensors))


def tensor_ends(rows: pa.Table, schema: TableSchema) -> pa.ChunkedArray:
    """Offset at which the last tensor of each row ends in its shard."""
    ends = [pc.add(rows[tensor.offset], rows[tensor.nbytes]) for tensor in schema.tensors]
    return ends[0] if len(ends) == 1 else pc.max_element_wise(*ends)


def _map_batches(path: Path) -> tuple[int, list[pa.RecordBatch]]:
    with pa.memory_map(str(path)) as file:
        content = file.read_buffer()
    reader = pa.ipc.open_file(content)
    # The address of the file's first byte turns addresses of values into offsets.
    return content.address, [reader.get_batch(index) for index in range(reader.num_record_batches)]


def _locators(batches: list[pa.RecordBatch], address: int, schema: TableSchema) -> dict[str, np.ndarray]:
    return {tensor.name: _locate(tensor, batches, address) for tensor in schema.tensors}


def _locate(tensor: TensorColumn, batches: list[pa.RecordBatch], address: int) -> np.ndarray:
    """int64 array (rows, 2): offset in the file and length of each tensor, in bytes."""
    size = tensor.kind.byte_width
    found = [np.zeros((0, 2), np.int64)]
    for batch in batches:
        lists = batch.column(tensor.name)
        bounds = lists.offsets.to_numpy().astype(np.int64)
        start = lists.values.buffers()[1].address - address if bounds[-1] > bounds[0] else 0
        found.append(np.stack([start + size * bounds[:-1], size * np.diff(bounds)], axis=1))
    return np.concatenate(found)


def _as_table(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch])


def _copy(batch: pa.RecordBatch) -> pa.RecordBatch:
    # Any column of a mapped batch would keep the whole file mapped.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as out:
        out.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def _with_locators(rows: pa.Table, shard: str, locators: dict[str, np.ndarray], schema: TableSchema) -> pa.Table:
    rows = rows.append_column("shard", pa.array([shard] * rows.num_rows, pa.string()))
    for tensor in schema.tensors:
        for side, name in enumerate((tensor.offset, tensor.nbytes)):
            rows = rows.append_column(name, pa.array(locators[tensor.name][:, side]))
    return rows.select(schema.stored.names).cast(schema.stored)
