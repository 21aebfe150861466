"""Repair of a tensor table: make index and shards agree after damage, and rewrite sparse shards to free disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.checksums import tensor_checksum
from pipeline.store.index import LIVE
from pipeline.store.shards import (
    next_shard_number,
    read_shard_index,
    read_shard_rows,
    shard_damage,
    shard_files,
    shard_number,
    tensor_bytes,
    tensor_ends,
    write_shard,
)
from schemas.table import TableSchema, TensorColumn


def reconcile(rows: pa.Table, shards: Path, schema: TableSchema, problem: Callable[[Path], str]) -> pa.Table:
    """Return the index of a table, changed so that it agrees with the shards. The index has one row per stored row. A
    shard is an Arrow file with rows and their tensors. Rows whose shard is missing or cut short are removed. Rows that
    only a shard holds are added. `rows` is the present index, and `shards` is the folder of the shards. `schema`
    describes the table. `problem(path)` returns what is wrong with a shard in words, or "".

    A shard that is cut short is deleted. If `problem` finds something, the rows of that shard are not added. A row is
    also not added if the index has a newer row with its key. If nothing differs, `rows` itself is returned.
    """
    ends = rows.select(["shard"]).append_column("end", tensor_ends(rows, schema))
    known = {row["shard"]: row["end_max"] for row in ends.group_by("shard").aggregate([("end", "max")]).to_pylist()}
    present = sorted((path.name for path in shard_files(shards)), key=shard_number)
    damaged = {name for name in [*known, *present] if shard_damage(shards / name, known.get(name, 0))}
    for name in damaged:
        (shards / name).unlink(missing_ok=True)
    if damaged & known.keys():
        rows = rows.filter(pc.invert(_in_shards(rows, damaged)))
    unknown = [shards / name for name in present if name not in known and name not in damaged]
    unknown = [path for path in unknown if not problem(path)]
    added = list(_newer_rows(rows, unknown, schema))
    return pa.concat_tables([rows, *added]) if added else rows


def damaged_shards(rows: pa.Table, shards: Path, schema: TableSchema) -> set[str]:
    """Return the names of the damaged shards (Arrow files with tensors) that `rows` use. A shard is damaged if it is
    missing or cut short. `rows` are rows of the index. `shards` is the folder of the shards. `schema` describes the
    table.

    Only the size and the last bytes of each shard are checked, not the tensors.
    """
    ends = rows.select(["shard"]).append_column("end", tensor_ends(rows, schema))
    known = ends.group_by("shard").aggregate([("end", "max")]).to_pylist()
    return {row["shard"] for row in known if shard_damage(shards / row["shard"], row["end_max"])}


def repack(rows: pa.Table, shards: Path, schema: TableSchema, shard_bytes: int) -> tuple[pa.Table, list[Path]]:
    """Copy the rows of mostly unused shards into new shards of about `shard_bytes` bytes. A shard is an Arrow file with
    rows and their tensors. `rows` are all rows of the table's index. `shards` is the folder of the shards. `schema`
    describes the table. Return (new rows, old paths). The new rows are all index rows with their new places. The old
    paths are those of the shards that are no longer needed.

    The caller must commit the new rows first, and then delete the old shards.

    While a run is unfinished (`live` is null in some row), a key may have two rows. Copying the older row would make it the
    newer one, so no row is copied then.
    """
    sparse = _sparse_shards(rows, shards, schema)
    inside = _in_shards(rows, {path.name for path in sparse})
    moving = rows.filter(inside)
    if not moving.num_rows:
        return rows, sparse
    key = schema.key[0]
    live = dict(zip(moving[key].to_pylist(), moving["live"].to_pylist(), strict=True))
    moved = [rows.filter(pc.invert(inside))]
    for tensors in _groups_to_move(sparse, moving, schema, shard_bytes):
        stored = write_shard(shards, next_shard_number(shards), tensors, schema)
        moved.append(stored.append_column(LIVE, pa.array([live[name] for name in stored[key].to_pylist()], pa.bool_())))
    return pa.concat_tables(moved).sort_by(key), sparse


def reclaimable_bytes(rows: pa.Table, shards: Path, schema: TableSchema) -> int:
    """Return how many bytes of disk the function `repack` would free. They are the bytes of mostly unused shards (Arrow
    files with tensors), less the tensors still in use. `rows` are all rows of the table's index. `shards` is the folder
    of the shards. `schema` describes the table.
    """
    used = _used_bytes(rows, schema)
    return sum(path.stat().st_size - used.get(path.name, 0) for path in _sparse_shards(rows, shards, schema))


def _sparse_shards(rows: pa.Table, shards: Path, schema: TableSchema) -> list[Path]:
    """Return the paths of the shards of which more than half is no longer needed. A shard is an Arrow file with rows
    and their tensors. `rows` are all rows of the table's index. `shards` is the folder of the shards. `schema`
    describes the table.

    A shard without a row in `rows` is always returned. While a run is unfinished, no other shard is returned. A run is
    unfinished if `live` is null in some row. After that, a shard is returned if the tensors of its rows in `rows` take
    less than half of the file. They must also take less than half of all tensor bytes in the file.
    """
    used = _used_bytes(rows, schema)
    finished = not rows["live"].null_count
    sparse = []
    for path in shard_files(shards):
        twice = 2 * used.get(path.name, 0)
        if path.name not in used or (finished and twice < path.stat().st_size and twice < _all_tensor_bytes(path, schema)):
            sparse.append(path)
    return sparse


def _all_tensor_bytes(path: Path, schema: TableSchema) -> int:
    return int(pc.sum(tensor_bytes(read_shard_index(path, schema), schema)).as_py())


def _newer_rows(rows: pa.Table, unknown: list[Path], schema: TableSchema) -> Iterator[pa.Table]:
    """Find rows of shards that the index of a table lacks, or has only in an older version. Yield them as one Arrow
    table per shard. A shard is a file with rows and their tensors; its name begins with a number. `rows` is the index:
    an Arrow table that lists the keys of the known rows, each with the name of its shard. `unknown` lists the paths of
    shards that the index does not name, sorted by number. `schema` describes the table.

    A shard with a larger number has newer rows. A row of a shard is yielded in two cases. In the first case, the index
    does not have the row's key. In the second case, the index has the key, but names a shard with a smaller number for
    it. For example, the index has the key "a" from shard 5. Then the row "a" of shard 7 is yielded, and the row "a" of
    shard 3 is left out. Rows that were yielded before count as rows of the index. A shard of which no row is yielded
    gives no table. A yielded table has the columns of `schema.stored` and the column `live`, which says whether the
    last finished run wanted the row. Here `live` is null, because this is not known.
    """
    key = schema.key[0]
    newest = {name: shard_number(shard) for name, shard in zip(rows[key].to_pylist(), rows["shard"].to_pylist(), strict=True)}
    for path in unknown:
        found, number = read_shard_index(path, schema), shard_number(path.name)
        found = found.filter(pa.array([newest.get(name, -1) < number for name in found[key].to_pylist()], pa.bool_()))
        newest.update(dict.fromkeys(found[key].to_pylist(), number))
        if found.num_rows:
            yield found.append_column(LIVE, pa.nulls(found.num_rows, pa.bool_()))


def _groups_to_move(sparse: list[Path], moving: pa.Table, schema: TableSchema, shard_bytes: int) -> Iterator[pa.Table]:
    """Read the rows in `moving` with their tensors, and yield them as tables of at least `shard_bytes` bytes. The last
    table may be smaller. `moving` holds rows of the table's index. `sparse` lists the paths of the shards (Arrow files)
    with these rows. `schema` describes the table.

    The yielded columns are those of `schema.batch` and one checksum column per tensor column. The checksums come from
    the index.
    """
    key, group = schema.key[0], list[pa.Table]()
    for path in sparse:
        indexed = moving.filter(_in_shards(moving, {path.name}))
        wanted = set(indexed[key].to_pylist())
        last = {name: row for row, name in enumerate(read_shard_index(path, schema)[key].to_pylist()) if name in wanted}
        if last:
            group.append(_with_index_checksums(read_shard_rows(path, sorted(last.values())), indexed, schema))
        if sum(table.nbytes for table in group) >= shard_bytes:
            yield pa.concat_tables(group)
            group = []
    if group:
        yield pa.concat_tables(group)


def fill_checksums(rows: pa.Table, shards: Path, schema: TableSchema) -> pa.Table:
    """Return the index of a table with its missing checksums filled in. The index `rows` is an Arrow table with one row
    for each row of the table, but without the tensors. A row of the table can have several tensors, one per tensor
    column. For each tensor column, the index has a column with the checksums of the tensors. Null means that a checksum
    is missing. The bytes of the tensors are read from the files in the folder `shards`. `schema` describes the table
    and names the tensor columns.

    Checksums that are not missing stay unchanged.
    """
    for tensor in schema.tensors:
        found = rows[tensor.checksum].to_pylist()
        for row, checksum in enumerate(row_checksums(rows, shards, tensor)):
            found[row] = checksum if found[row] is None else found[row]
        place = rows.schema.get_field_index(tensor.checksum)
        rows = rows.set_column(place, tensor.checksum_field, pa.array(found, pa.int64()))
    return rows


def row_checksums(rows: pa.Table, shards: Path, tensor: TensorColumn) -> Iterator[int]:
    """Yield one checksum per row of a table index, in the order of `rows`. Each is the xxh3 checksum of a tensor's
    bytes, as a signed 64-bit integer. `tensor` is the column of these tensors. `shards` is the folder of the files that
    hold the tensors.
    """
    for shard, start, size in zip(*(rows[name].to_pylist() for name in ("shard", tensor.offset, tensor.nbytes)), strict=True):
        with (shards / shard).open("rb") as file:
            file.seek(start)
            yield tensor_checksum(np.frombuffer(file.read(size), np.uint8))


def _with_index_checksums(rows: pa.Table, indexed: pa.Table, schema: TableSchema) -> pa.Table:
    """Return `rows` with the checksums that the index has for them. `rows` are rows of one shard, with their tensors.
    `indexed` are rows of the index; every key in `rows` must occur there. `schema` describes the table. The result has
    the columns of `schema.batch`, then one checksum column for each tensor column.

    Checksums in the shard are not used, because shards of an earlier release have none.
    """
    key = schema.key[0]
    position = {name: place for place, name in enumerate(indexed[key].to_pylist())}
    order = pa.array([position[name] for name in rows[key].to_pylist()], pa.int64())
    rows = rows.select(schema.batch.names)
    for tensor in schema.tensors:
        rows = rows.append_column(tensor.checksum_field, indexed[tensor.checksum].take(order))
    return rows


def _in_shards(rows: pa.Table, names: set[str]) -> pa.ChunkedArray:
    return pc.is_in(rows["shard"], pa.array(sorted(names), pa.string()))


def _used_bytes(rows: pa.Table, schema: TableSchema) -> dict[str, int]:
    """Return a dict from shard name to the bytes of the tensors that `rows` use in it. A shard is an Arrow file with
    tensors. `rows` are rows of the table's index. `schema` describes the table.
    """
    sizes = rows.select(["shard"]).append_column("bytes", tensor_bytes(rows, schema))
    return {row["shard"]: row["bytes_sum"] for row in sizes.group_by("shard").aggregate([("bytes", "sum")]).to_pylist()}
