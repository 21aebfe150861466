"""Makes a tensor table's index and its shards agree: after damage, and when dead rows are to go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.index import LIVE
from pipeline.store.shards import damage, next_number, number_of, read_index, read_rows, row_bytes, row_ends, write_shard
from schemas.table import TableSchema


def agreeing(rows: pa.Table, shards: Path, schema: TableSchema) -> pa.Table:
    """The index without the rows of shards that are lost, and with those of shards it does not know. Cut shards are deleted."""
    ends = rows.select(["shard"]).append_column("end", row_ends(rows, schema))
    known = {row["shard"]: row["end_max"] for row in ends.group_by("shard").aggregate([("end", "max")]).to_pylist()}
    here = sorted((path.name for path in shards.glob("*.arrow")), key=number_of)
    lost = {name for name in [*known, *here] if damage(shards / name, known.get(name, 0))}
    for name in lost:
        (shards / name).unlink(missing_ok=True)
    if lost & known.keys():
        rows = rows.filter(_of_shards(rows, lost, False))
    strange = [shards / name for name in here if name not in known and name not in lost]
    fresh = list(_newer(rows, strange, schema))
    return pa.concat_tables([rows, *fresh]) if fresh else rows


def repacked(rows: pa.Table, shards: Path, schema: TableSchema, shard_bytes: int) -> tuple[pa.Table, list[Path]]:
    """The index with the rows of half-empty shards moved to new ones, and the shards that may go once it stands.

    While a run is unfinished a key may have two rows, and moving the older would make it the newer: then nothing moves.
    """
    doomed = _doomed(rows, shards, schema)
    moving = rows.filter(_of_shards(rows, {path.name for path in doomed}, True))
    if not moving.num_rows:
        return rows, doomed
    key = schema.key[0]
    live = dict(zip(moving[key].to_pylist(), moving["live"].to_pylist(), strict=True))
    moved = [rows.filter(_of_shards(rows, {path.name for path in doomed}, False))]
    for tensors in _gathered(doomed, moving, schema, shard_bytes):
        found = write_shard(shards, next_number(shards), tensors, schema)
        moved.append(found.append_column(LIVE, pa.array([live[name] for name in found[key].to_pylist()], pa.bool_())))
    return pa.concat_tables(moved).sort_by(key), doomed


def spare(rows: pa.Table, shards: Path, schema: TableSchema) -> int:
    """How many bytes `repacked` would free: those of the shards that go, less the tensors that move out of them."""
    doomed, used = _doomed(rows, shards, schema), _sums(rows, schema)
    return sum(path.stat().st_size - used.get(path.name, 0) for path in doomed)


def _doomed(rows: pa.Table, shards: Path, schema: TableSchema) -> list[Path]:
    """Parts of which no row is named, or less than half of their bytes."""
    used = _sums(rows, schema)
    settled = not rows["live"].null_count
    doomed = []
    for path in sorted(shards.glob("*.arrow")):
        sparse = settled and path.name in used and 2 * used[path.name] < path.stat().st_size
        if path.name not in used or (
            sparse and 2 * used[path.name] < pc.sum(row_bytes(read_index(path, schema), schema)).as_py()
        ):
            doomed.append(path)
    return doomed


def _newer(rows: pa.Table, strange: list[Path], schema: TableSchema) -> Iterator[pa.Table]:
    """The rows of unknown shards, oldest part first, that are newer than the index's row of the same key."""
    key = schema.key[0]
    known = {name: number_of(part) for name, part in zip(rows[key].to_pylist(), rows["shard"].to_pylist(), strict=True)}
    for path in strange:
        found = read_index(path, schema)
        names, number = found[key].to_pylist(), number_of(path.name)
        found = found.filter(pa.array([known.get(name, -1) < number for name in names], pa.bool_()))
        known.update(dict.fromkeys(found[key].to_pylist(), number))
        if found.num_rows:
            yield found.append_column(LIVE, pa.nulls(found.num_rows, pa.bool_()))


def _gathered(doomed: list[Path], moving: pa.Table, schema: TableSchema, shard_bytes: int) -> Iterator[pa.Table]:
    """The rows that move, with their tensors, in tables of about one part."""
    key, held = schema.key[0], list[pa.Table]()
    for path in doomed:
        wanted = set(moving.filter(_of_shards(moving, {path.name}, True))[key].to_pylist())
        last = {name: row for row, name in enumerate(read_index(path, schema)[key].to_pylist()) if name in wanted}
        if last:
            held.append(read_rows(path, sorted(last.values())))
        if sum(table.nbytes for table in held) >= shard_bytes:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def _of_shards(rows: pa.Table, names: set[str], inside: bool) -> pa.ChunkedArray:
    found = pc.is_in(rows["shard"], pa.array(sorted(names), pa.string()))
    return found if inside else pc.invert(found)


def _sums(rows: pa.Table, schema: TableSchema) -> dict[str, int]:
    """For each shard the bytes of the tensors that the rows name in it."""
    sizes = rows.select(["shard"]).append_column("bytes", row_bytes(rows, schema))
    return {row["shard"]: row["bytes_sum"] for row in sizes.group_by("shard").aggregate([("bytes", "sum")]).to_pylist()}
