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
    """A damaged file of a table. `file` is its path relative to the table's folder. `problem` says in words what is wrong.
    `keys` are the keys of the rows that it damages, as text; it is empty if no single row can be named.
    """

    file: str
    problem: str
    keys: tuple[str, ...] = ()


def examine(table: TableFolder) -> Iterator[Damage]:
    """Read all files of a table and yield those that are damaged. Nothing is written."""
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
    """Yield a `Damage` for each damaged file of the table's index. Two versions of the index are examined: the one that
    readers use, and the newest.
    """
    newest = max(table.index.versions(), default=0)
    seen = {newest, table.manifest()["lance_version"]} if table.exists else {newest}
    for version in sorted(seen - {0}):
        try:
            for path, problem in table.index.damaged(version).items():
                yield Damage(path.relative_to(table.folder).as_posix(), problem)
        except DamageError as error:
            yield Damage(table.index.path.name, f"cannot be read: {error}")


def _examine_shards(table: TableFolder, rows: pa.Table) -> Iterator[Damage]:
    """Yield a `Damage` for each damaged shard of a table. A shard is an Arrow file that holds the tensors of some rows.
    `rows` holds the rows of the table's index. All shards in the table's folder are examined, even if no row names
    them.

    `keys` of a `Damage` lists the damaged rows. If tensors differ from their checksums, only the rows of these tensors
    are listed. If the damage is of another kind, such as a missing file, all rows of the shard are listed.
    """
    schema, key = table.schema, table.schema.key[0]
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
        if bad:
            yield Damage(file, "holds tensors that differ from their checksums", tuple(sorted(map(str, bad))))
        elif problem := table.checksums.damage(file, fresh=True):
            yield Damage(file, f"{problem}, outside its tensors", tuple(map(str, keys)))


def _examine_artifacts(table: TableFolder, rows: pa.Table) -> Iterator[Damage]:
    """Yield a `Damage` for each artifact of a table that is missing or differs from its checksum. An artifact is a file
    in the subfolder `artifacts` of `table`, the table's folder. `rows` holds the rows of the table's index. A row can
    name an artifact. The field `keys` of a `Damage` tells which rows name the damaged file, with one text per row, such
    as "cat 512".

    The text joins the values of the row's key columns, each cut to 16 characters. A file that only a row names, but
    that does not exist, counts as missing.
    """
    named: dict[str, list[str]] = {}
    if table.schema.artifact:
        for row in rows.to_pylist():
            key = " ".join(str(row[name])[:16] for name in table.schema.key)
            named.setdefault(f"artifacts/{row[table.schema.artifact]}", []).append(key)
    artifacts = table.folder / "artifacts"
    there = {path.relative_to(table.folder).as_posix() for path in artifacts.rglob("*") if path.is_file()}
    for name in sorted(there | named.keys()):
        if problem := table.checksums.damage(name, fresh=True):
            yield Damage(name, problem, tuple(named.get(name, ())))
