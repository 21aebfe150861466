"""Repair of a tensor table: make index and shards agree, find damaged tensors, rewrite sparse shards to free disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.checksums import Checksums, tensor_checksum
from pipeline.store.index import LIVE
from pipeline.store.shards import (
    damaged_shards,
    read_shard_index,
    read_shard_rows,
    shard_damage,
    shard_files,
    shard_number,
    tensor_bytes,
    write_shard,
)
from schemas.table import TableSchema


@dataclass(frozen=True)
class Damage:
    file: str  # relative to the table's folder
    problem: str
    keys: tuple[str, ...] = ()  # of the rows that it damages; empty if no single row can be named


def reconcile(rows: pa.Table, checksums: Checksums, schema: TableSchema) -> pa.Table:
    """`rows` without those of missing or cut shards (deleted), with newer ones only in a shard; `rows` itself if none differs."""
    shards = checksums.folder / "shards"
    known = set(pc.unique(rows["shard"]).to_pylist())
    unknown = sorted((path.name for path in shard_files(shards) if path.name not in known), key=shard_number)
    damaged = {*damaged_shards(rows, shards, schema), *(name for name in unknown if shard_damage(shards / name, 0))}
    for name in damaged:
        (shards / name).unlink(missing_ok=True)
    if damaged & known:
        rows = rows.filter(pc.invert(_in_shards(rows, damaged)))
    if not unknown:
        return rows
    key, added = schema.key[0], []
    newest = {name: shard_number(shard) for name, shard in zip(rows[key].to_pylist(), rows["shard"].to_pylist(), strict=True)}
    for shard in unknown:
        if shard in damaged or checksums.damage(f"shards/{shard}"):
            continue
        found, number = read_shard_index(shards / shard, schema), shard_number(shard)
        found = found.filter(pa.array([newest.get(name, -1) < number for name in found[key].to_pylist()], pa.bool_()))
        newest.update(dict.fromkeys(found[key].to_pylist(), number))
        if found.num_rows:
            added.append(found.append_column(LIVE, pa.nulls(found.num_rows, pa.bool_())))
    return pa.concat_tables([rows, *added]) if added else rows


def examine_shards(rows: pa.Table, checksums: Checksums, schema: TableSchema) -> Iterator[Damage]:
    """Reads every shard and compares each tensor with its checksum; also shards that no row names."""
    shards, places = checksums.folder / "shards", _places(rows)
    for name in dict.fromkeys([*places, *(path.name for path in shard_files(shards))]):
        path, file, own = shards / name, f"shards/{name}", rows.take(places.get(name, pa.array([], pa.int64())))
        keys = own[schema.key[0]].to_pylist()
        if problem := shard_damage(path, 0):
            yield Damage(file, problem, tuple(map(str, keys)))
            continue
        bad = set()
        with path.open("rb") as content:
            for tensor in schema.tensors:
                located = (own[column].to_pylist() for column in (tensor.offset, tensor.nbytes, tensor.checksum))
                for key, start, size, checksum in zip(keys, *located, strict=True):
                    content.seek(start)
                    if tensor_checksum(content.read(size)) != checksum:
                        bad.add(str(key))
        # Only the rows of these tensors are named; for other damage, all rows of the shard.
        if bad:
            yield Damage(file, "holds tensors that differ from their checksums", tuple(sorted(bad)))
        elif problem := checksums.damage(file, fresh=True):
            yield Damage(file, f"{problem}, outside its tensors", tuple(map(str, keys)))


def repack(rows: pa.Table, table: Path, schema: TableSchema, shard_bytes: int) -> tuple[pa.Table, list[Path]]:
    """(rows with their new places, old shards). The caller must commit the rows before it deletes the shards."""
    sparse = _sparse_shards(rows, table / "shards", schema)
    inside = _in_shards(rows, {path.name for path in sparse})
    moving = rows.filter(inside)
    if not moving.num_rows:
        return rows, sparse
    key = schema.key[0]
    live = dict(zip(moving[key].to_pylist(), moving["live"].to_pylist(), strict=True))
    moved = [rows.filter(pc.invert(inside))]
    for tensors in _groups_to_move(sparse, moving, schema, shard_bytes):
        stored = write_shard(table, tensors, schema)
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
        if path.name not in used or (
            finished
            and twice < path.stat().st_size
            and twice < pc.sum(tensor_bytes(read_shard_index(path, schema), schema)).as_py()
        ):
            sparse.append(path)
    return sparse


def _groups_to_move(sparse: list[Path], moving: pa.Table, schema: TableSchema, shard_bytes: int) -> Iterator[pa.Table]:
    """The rows `moving` with their tensors and checksums, in tables of at least `shard_bytes`."""
    key, places, group = schema.key[0], _places(moving), list[pa.Table]()
    for path in sparse:
        if path.name not in places:
            continue
        wanted = set(moving[key].take(places[path.name]).to_pylist())
        # A key may occur twice in a shard: the later row is the newer one.
        last = {name: row for row, name in enumerate(read_shard_index(path, schema)[key].to_pylist()) if name in wanted}
        if last:
            group.append(read_shard_rows(path, sorted(last.values())).cast(schema.shard))
        if sum(table.nbytes for table in group) >= shard_bytes:
            yield pa.concat_tables(group)
            group = []
    if group:
        yield pa.concat_tables(group)


def _places(rows: pa.Table) -> dict[str, pa.Array]:
    """Shard -> the positions of its rows, in their order."""
    shards = rows["shard"].combine_chunks().dictionary_encode()
    order = np.argsort(shards.indices.to_numpy(), kind="stable")
    ends = np.cumsum(np.bincount(shards.indices.to_numpy(), minlength=len(shards.dictionary)))[:-1]
    return dict(zip(shards.dictionary.to_pylist(), map(pa.array, np.split(order, ends)), strict=False))


def _in_shards(rows: pa.Table, names: set[str]) -> pa.ChunkedArray:
    return pc.is_in(rows["shard"], pa.array(sorted(names), pa.string()))


def _used_bytes(rows: pa.Table, schema: TableSchema) -> dict[str, int]:
    sizes = rows.select(["shard"]).append_column("bytes", tensor_bytes(rows, schema))
    return {row["shard"]: row["bytes_sum"] for row in sizes.group_by("shard").aggregate([("bytes", "sum")]).to_pylist()}
