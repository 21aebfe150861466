"""Checks every file of a table against its checksum, and says which rows a damaged file holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from pipeline.store.index import DamageError
from pipeline.store.repair import row_checksums
from pipeline.store.shards import shard_damage, shard_files
from pipeline.store.table import TableFolder


@dataclass(frozen=True)
class Damage:
    """A damaged file of a table."""

    file: str  # relative to the table's folder
    problem: str
    keys: tuple[str, ...] = ()  # of the rows that it damages; empty if no single row can be named


def examine(table: TableFolder) -> Iterator[Damage]:
    """Reads all files of a table; nothing is written."""
    if not table.folder.is_dir():
        return
    try:
        table.manifest()
    except ValueError as error:
        if table.manifest_file.exists():
            yield Damage("manifest.json", str(error).partition(" is ")[2].partition(";")[0] or "is damaged")
    damaged_index = list(_examine_index(table))
    yield from damaged_index
    rows = table.index.read_newest()
    if table.schema.tensors:
        yield from _examine_shards(table, rows)
    yield from _examine_artifacts(table, rows)


def _examine_index(table: TableFolder) -> Iterator[Damage]:
    newest = max(table.index.versions(), default=0)
    # The version that readers use, and the newest.
    seen = {newest, table.manifest()["lance_version"]} if table.exists else {newest}
    for version in sorted(seen - {0}):
        try:
            for path, problem in table.index.damaged(version).items():
                yield Damage(path.relative_to(table.folder).as_posix(), problem)
        except DamageError as error:
            yield Damage(table.index.path.name, f"cannot be read: {error}")


def _examine_shards(table: TableFolder, rows: pa.Table) -> Iterator[Damage]:
    schema, key = table.schema, table.schema.key[0]
    # Also shards that no row names.
    names = dict.fromkeys([*rows["shard"].to_pylist(), *(path.name for path in shard_files(table.shards))])
    for name in names:
        path, file = table.shards / name, f"{table.shards.name}/{name}"
        own = rows.filter(pa.array([shard == name for shard in rows["shard"].to_pylist()], pa.bool_()))
        keys = own[key].to_pylist()
        if problem := shard_damage(path, 0):
            yield Damage(file, problem, tuple(map(str, keys)))
            continue
        bad = set()
        for tensor in schema.tensors:
            stored = own[tensor.checksum].to_pylist()
            found = row_checksums(own, table.shards, tensor)
            bad |= {each for each, one, other in zip(keys, stored, found, strict=True) if one is not None and one != other}
        # Only the rows of these tensors are named; for other damage, all rows of the shard.
        if bad:
            yield Damage(file, "holds tensors that differ from their checksums", tuple(sorted(map(str, bad))))
        elif problem := table.checksums.damage(file, fresh=True):
            yield Damage(file, f"{problem}, outside its tensors", tuple(map(str, keys)))


def _examine_artifacts(table: TableFolder, rows: pa.Table) -> Iterator[Damage]:
    named: dict[str, list[str]] = {}
    if table.schema.artifact:
        for row in rows.to_pylist():
            key = " ".join(str(row[name])[:16] for name in table.schema.key)
            named.setdefault(f"artifacts/{row[table.schema.artifact]}", []).append(key)
    artifacts = table.folder / "artifacts"
    there = {path.relative_to(table.folder).as_posix() for path in artifacts.rglob("*") if path.is_file()}
    # A file that only a row names is missing.
    for name in sorted(there | named.keys()):
        if problem := table.checksums.damage(name, fresh=True):
            yield Damage(name, problem, tuple(named.get(name, ())))
