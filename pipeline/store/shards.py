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
    """Return the folder of the shards (Arrow files with tensors) of a table. `table` is the table's folder. The result is
    TABLE/shards, or the folder's old name if an earlier version of this program wrote the table.
    """
    folder = table / "shards"
    old = (table / name for name, new in FOLDERS.items() if new == folder.name)
    return folder if folder.exists() else next((path for path in old if path.is_dir()), folder)


def shard_files(folder: Path) -> list[Path]:
    """Return the paths of the shards (Arrow files with tensors) in `folder`, sorted by name. Temporary folders of killed
    processes are left out, although their names end as those of shards do.
    """
    return sorted(folder.glob("[!.]*.arrow"))


def shard_number(name: str) -> int:
    """Return the number at the start of a shard's file name, such as 12 for "00000012-ab.arrow"; 0 if the name starts with no
    number.
    """
    head = name.split("-", 1)[0]
    return int(head) if head.isdigit() else 0


def next_shard_number(folder: Path) -> int:
    """Return the number for the next shard in `folder`. A shard is a file with rows of a table. The result is one more
    than the largest number there. In an empty folder, it is 1.
    """
    return 1 + max((shard_number(path.name) for path in shard_files(folder)), default=0)


def write_shard(folder: Path, number: int, rows: pa.Table, schema: TableSchema) -> pa.Table:
    """Write rows with their tensors to a new shard (an Arrow file) in `folder`. Return the rows without tensors, as the
    index stores them (`schema.stored`). The returned rows hold the name of the shard, and the position and checksum of
    each tensor. `number` becomes the start of the file name. `rows` has the columns of `schema.batch`, and may have
    checksum columns. Existing checksums are kept, and the others are computed.
    """
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
    """Return `rows` with the columns of a shard file (`schema.shard`), which include a checksum per tensor. `rows` has
    the columns of `schema.batch`, and may have checksum columns. Missing checksums are computed from the tensors.
    Existing checksums are kept.

    Computing existing checksums again would hide damage.
    """
    for tensor in schema.tensors:
        if tensor.checksum not in rows.column_names:
            rows = rows.append_column(tensor.checksum_field, pa.nulls(rows.num_rows, pa.int64()))
        known = rows[tensor.checksum]
        if known.null_count:
            computed = [checksum for lists in rows[tensor.name].chunks for checksum in tensor_checksums(lists)]
            known = pc.coalesce(known, pa.array(computed, pa.int64()))
        rows = rows.set_column(rows.schema.get_field_index(tensor.checksum), tensor.checksum_field, known)
    return rows.select(schema.shard.names).cast(schema.shard)


def tensor_checksums(lists: pa.ListArray) -> list[int]:
    """Return the checksum of each tensor of a column, as a list of integers. A checksum is the xxh3 hash of the
    tensor's bytes, as a signed 64-bit number. `lists` holds one list of values per row.
    """
    values, bounds = lists.values.to_numpy(), lists.offsets.to_numpy()
    return [tensor_checksum(values[start:stop]) for start, stop in itertools.pairwise(bounds)]


def rows_per_shard(rows: pa.Table, schema: TableSchema, shard_bytes: int) -> int:
    """Return how many rows from the start of `rows` go into one shard (an Arrow file with tensors). This is the largest
    number of rows whose tensors take at most `shard_bytes` bytes together, but at least 1. `schema` describes the
    table. If the table has no tensors, the result is the number of all rows.
    """
    if not schema.tensors:
        return int(rows.num_rows)
    sizes = [tensor.kind.byte_width * pc.list_value_length(rows[tensor.name]).to_numpy() for tensor in schema.tensors]
    ends = np.cumsum(np.sum(sizes, axis=0), dtype=np.int64)
    return max(1, int(np.searchsorted(ends, shard_bytes, "right")))


def overhead_bytes(schema: TableSchema, rows: pa.Table, tensors: int) -> int:
    """Estimate the disk space in bytes that a finished table takes besides its tensors. `schema` describes the table.
    `rows` holds the table's rows, and may lack columns. Values of a missing column are assumed to be short, such as 0
    or "". `tensors` is the size of all tensors together, in bytes. The result is 0 if there are no rows.

    The other columns, the index and the headers of shards (Arrow files with tensors) are counted. The size of the
    shards is exact if all shards have equally many rows. The size of the index is an approximation.
    """
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
    """Return `rows` with all columns of a shard, but with an empty list in place of every tensor. A shard is an Arrow
    file with rows and their tensors. The result serves to estimate the size of a shard without its tensors. `schema`
    describes the table. `rows` has no tensor columns, and may lack other columns. Any other missing column is filled
    with null if the column allows nulls. Otherwise, the column is filled with "", 0 or `[0, 0]`, depending on its type.

    A missing column of 64-bit integers is filled with 0, even if nulls are allowed. Checksums of tensors are 64-bit
    integers, and are never null in new files.
    """
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
    """Return the size of an Arrow file with `rows` as one batch, in bytes. Nothing is written."""
    sink = pa.MockOutputStream()
    with pa.ipc.new_file(sink, rows.schema) as out:
        out.write_table(rows.combine_chunks())
    return int(sink.size())


def read_shard_index(path: Path, schema: TableSchema) -> pa.Table:
    """Return the rows of the shard `path` (an Arrow file with tensors) without their tensors. `schema` describes the
    table. The rows have the columns of `schema.stored`, which hold the position of each tensor in the file. The
    returned table does not keep the file open. Raises ValueError if the file has the columns of another table.
    """
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
    """Return some rows of a shard (an Arrow file with rows and their tensors). `path` is the shard. `positions` are the
    indices of the rows, from 0. All columns are returned, including tensors. The returned table does not keep the file
    open.
    """
    _, batches = _map_batches(path)
    return pa.Table.from_batches(batches).take(pa.array(positions, pa.int64()))


def shard_damage(path: Path, needed: int) -> str:
    """Describe the damage of the shard `path` (an Arrow file with tensors) in words, such as "is missing" or "is cut
    short: ...". Return "" if it is undamaged. `needed` is the least number of bytes that the file must have to hold its
    rows.
    """
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
    """Return the size of all tensors of each row, as an Arrow array with one number of bytes per row. `rows` has the
    columns of `schema.stored`, which hold the size of each tensor. `schema` describes the table.
    """
    return functools.reduce(pc.add, (rows[tensor.nbytes] for tensor in schema.tensors))


def tensor_ends(rows: pa.Table, schema: TableSchema) -> pa.ChunkedArray:
    """Return the offset at which the last tensor of each row ends in its shard. The result holds one number of bytes
    per row. `rows` are rows of the index, with the columns of `schema.stored`.
    """
    ends = [pc.add(rows[tensor.offset], rows[tensor.nbytes]) for tensor in schema.tensors]
    return ends[0] if len(ends) == 1 else pc.max_element_wise(*ends)


def _map_batches(path: Path) -> tuple[int, list[pa.RecordBatch]]:
    """Map the shard `path` (an Arrow file with tensors) into memory. Return (address, batches): the memory address of
    the file's first byte, and the shard's record batches. Values are read from disk when they are used.
    """
    with pa.memory_map(str(path)) as file:
        content = file.read_buffer()
    reader = pa.ipc.open_file(content)
    return content.address, [reader.get_batch(index) for index in range(reader.num_record_batches)]


def _locators(batches: list[pa.RecordBatch], address: int, schema: TableSchema) -> dict[str, np.ndarray]:
    """Return the position of every tensor in a memory-mapped shard. The result maps a tensor's name to an int64 array
    of shape `(rows, 2)`. Column 0 is the offset in the file, and column 1 is the length, both in bytes. `batches` are
    the shard's record batches. `address` is the memory address of the file's first byte. `schema` is the table's
    schema.
    """
    return {tensor.name: _locate(tensor, batches, address) for tensor in schema.tensors}


def _locate(tensor: TensorColumn, batches: list[pa.RecordBatch], address: int) -> np.ndarray:
    """Return where the values of one tensor column lie in a shard (an Arrow file with tensors). The result is an int64
    array `(rows, 2)`. Column 0 is the offset in the file, and column 1 is the length, both in bytes. `tensor` describes
    the column. `batches` are the shard's record batches, memory-mapped. `address` is the memory address of the file's
    first byte.
    """
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
    """Copy a memory-mapped record batch into ordinary memory, and return the copy. The copy does not keep the file
    mapped.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as out:
        out.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def _with_locators(rows: pa.Table, shard: str, locators: dict[str, np.ndarray], schema: TableSchema) -> pa.Table:
    """Return `rows` with added columns that tell where the tensors are stored. The argument `shard` is the file name of
    the shard (an Arrow file with tensors). `locators` maps the name of a tensor to an int64 array `(rows, 2)` of
    offsets and sizes. The result has the columns of `schema.stored`.

    The added columns are `shard`, and an offset and a size in bytes for each tensor.
    """
    rows = rows.append_column("shard", pa.array([shard] * rows.num_rows, pa.string()))
    for tensor in schema.tensors:
        for side, name in enumerate((tensor.offset, tensor.nbytes)):
            rows = rows.append_column(name, pa.array(locators[tensor.name][:, side]))
    return rows.select(schema.stored.names).cast(schema.stored)
