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
    """The index `rows` without rows of missing or cut shards, and with newer rows that only a shard holds.

    Shards that are cut short are deleted. Returns `rows` itself if nothing differs.
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
    """Shards of `rows` that are missing or cut short; only the size and the last bytes are checked."""
    ends = rows.select(["shard"]).append_column("end", tensor_ends(rows, schema))
    known = ends.group_by("shard").aggregate([("end", "max")]).to_pylist()
    return {row["shard"] for row in known if shard_damage(shards / row["shard"], row["end_max"])}


def repack(rows: pa.Table, shards: Path, schema: TableSchema, shard_bytes: int) -> tuple[pa.Table, list[Path]]:
    """(rows with their new places, old shards). The caller must commit the rows before it deletes the shards."""
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
    used = _used_bytes(rows, schema)
    return sum(path.stat().st_size - used.get(path.name, 0) for path in _sparse_shards(rows, shards, schema))


def _sparse_shards(rows: pa.Table, shards: Path, schema: TableSchema) -> list[Path]:
    used = _used_bytes(rows, schema)
    # While a run is unfinished (`live` is null), a key may have two rows; copying the older would make it the newer one.
    finished = not rows["live"].null_count
    sparse = []
    for path in shard_files(shards):
        twice = 2 * used.get(path.name, 0)
        # Small tensors may take less than half of a file without being sparse.
        if path.name not in used or (finished and twice < path.stat().st_size and twice < _all_tensor_bytes(path, schema)):
            sparse.append(path)
    return sparse


def _all_tensor_bytes(path: Path, schema: TableSchema) -> int:
    return int(pc.sum(tensor_bytes(read_shard_index(path, schema), schema)).as_py())


def _newer_rows(rows: pa.Table, unknown: list[Path], schema: TableSchema) -> Iterator[pa.Table]:
    """Rows of unindexed shards that the index lacks or has only from an older shard. `unknown` is sorted by shard number."""
    key = schema.key[0]
    newest = {name: shard_number(shard) for name, shard in zip(rows[key].to_pylist(), rows["shard"].to_pylist(), strict=True)}
    for path in unknown:
        found, number = read_shard_index(path, schema), shard_number(path.name)
        found = found.filter(pa.array([newest.get(name, -1) < number for name in found[key].to_pylist()], pa.bool_()))
        newest.update(dict.fromkeys(found[key].to_pylist(), number))
        if found.num_rows:
            yield found.append_column(LIVE, pa.nulls(found.num_rows, pa.bool_()))


def _groups_to_move(sparse: list[Path], moving: pa.Table, schema: TableSchema, shard_bytes: int) -> Iterator[pa.Table]:
    """The rows `moving` with their tensors, in tables of at least `shard_bytes`."""
    key, group = schema.key[0], list[pa.Table]()
    for path in sparse:
        indexed = moving.filter(_in_shards(moving, {path.name}))
        wanted = set(indexed[key].to_pylist())
        # A key may occur twice in a shard: the later row is the newer one.
        last = {name: row for row, name in enumerate(read_shard_index(path, schema)[key].to_pylist()) if name in wanted}
        if last:
            group.append(_with_index_checksums(read_shard_rows(path, sorted(last.values())), indexed, schema))
        if sum(table.nbytes for table in group) >= shard_bytes:
            yield pa.concat_tables(group)
            group = []
    if group:
        yield pa.concat_tables(group)


def fill_checksums(rows: pa.Table, shards: Path, schema: TableSchema) -> pa.Table:
    """The index with missing checksums computed from the shards."""
    for tensor in schema.tensors:
        found = rows[tensor.checksum].to_pylist()
        for row, checksum in enumerate(row_checksums(rows, shards, tensor)):
            found[row] = checksum if found[row] is None else found[row]
        place = rows.schema.get_field_index(tensor.checksum)
        rows = rows.set_column(place, tensor.checksum_field, pa.array(found, pa.int64()))
    return rows


def row_checksums(rows: pa.Table, shards: Path, tensor: TensorColumn) -> Iterator[int]:
    for shard, start, size in zip(*(rows[name].to_pylist() for name in ("shard", tensor.offset, tensor.nbytes)), strict=True):
        with (shards / shard).open("rb") as file:
            file.seek(start)
            yield tensor_checksum(np.frombuffer(file.read(size), np.uint8))


def _with_index_checksums(rows: pa.Table, indexed: pa.Table, schema: TableSchema) -> pa.Table:
    key = schema.key[0]
    position = {name: place for place, name in enumerate(indexed[key].to_pylist())}
    order = pa.array([position[name] for name in rows[key].to_pylist()], pa.int64())
    rows = rows.select(schema.batch.names)
    for tensor in schema.tensors:
        # Not from the shard: shards of an earlier release have none.
        rows = rows.append_column(tensor.checksum_field, indexed[tensor.checksum].take(order))
    return rows


def _in_shards(rows: pa.Table, names: set[str]) -> pa.ChunkedArray:
    return pc.is_in(rows["shard"], pa.array(sorted(names), pa.string()))


def _used_bytes(rows: pa.Table, schema: TableSchema) -> dict[str, int]:
    sizes = rows.select(["shard"]).append_column("bytes", tensor_bytes(rows, schema))
    return {row["shard"]: row["bytes_sum"] for row in sizes.group_by("shard").aggregate([("bytes", "sum")]).to_pylist()}
