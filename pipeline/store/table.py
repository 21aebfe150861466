"""A table on disk as readers see it: its folder, its manifest, its rows and tensors. `Writer` changes it.

tables/<stage>/<recipe>/
    manifest.json    written last: a table without it has no readers
    rows.lance/      the rows; the column `live` is true (wanted), false (not wanted any more) or null (run not finished)
    shards/*.arrow   tensor tables only: the rows again, with their tensors
    artifacts/       files that rows name
    checksums.jsonl  the checksum of every file above
    damaged/         files that differed from their checksum and were replaced
    lock             who is writing
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.checksums import text_checksum
from pipeline.store.disk import make_folder, size_of, sync
from pipeline.store.index import LIVE, DamageError, Index
from pipeline.store.reader import ShardReader
from pipeline.store.repair import damaged_shards, reclaimable_bytes
from pipeline.store.rows import newest_per_key
from pipeline.store.shards import shard_files, shards_folder
from schemas.renames import FOLDERS
from schemas.table import TableSchema

MANIFEST = {"table", "recipe", "rows", "dead", "bytes", "lance_version", "facts"}  # entries, without the checksum


class TableFolder:
    """The table of one stage and recipe, opened for reading. `folder` need not exist yet."""

    def __init__(self, folder: Path, schema: TableSchema) -> None:
        self.folder = folder
        self.schema = schema
        self.index = Index(folder / "rows.lance", schema.stored.append(LIVE))
        self.checksums = self.index.checksums

    @property
    def shards(self) -> Path:
        return shards_folder(self.folder)

    @property
    def manifest_file(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def exists(self) -> bool:
        try:
            self.manifest()
        except ValueError:
            return False
        return True

    @property
    def has_current_columns(self) -> bool:
        """False for a table that an earlier release wrote with other columns."""
        if not self.exists:
            return False
        columns = self.manifest().get("recipe", {}).get("columns")
        return columns is None or columns == self.schema.recorded

    def manifest(self) -> dict[str, Any]:
        """Of the last finished run. Raises ValueError if there is none or the file is damaged."""
        path = self.manifest_file
        try:
            found = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"there is no table {self.schema.name} yet: {path} is missing; run the stage first") from None
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); run the stage again") from None
        if not isinstance(found, dict) or not isinstance(found.get("lance_version"), int):
            raise ValueError(f"{path} is damaged (it names no Lance version); run the stage again")
        checksum = found.pop("checksum", None)  # an earlier release wrote none
        # Without a checksum, an unknown entry is a checksum whose name is damaged.
        if checksum != manifest_checksum(found) and (checksum is not None or found.keys() - MANIFEST):
            raise ValueError(f"{path} is damaged (it differs from its checksum); run the stage again")
        return found

    def rows(self, version: int | None = None) -> pa.Table:
        """Rows that readers see, without those whose shard or artifact is missing or has another size.

        Raises ValueError if no run has finished or its rows are damaged, DamageError if a given Lance `version` cannot be read.
        """
        if version is not None:
            return self._live_rows(self.index.read(version))
        manifest = self.manifest()
        try:
            rows = self.index.read(manifest["lance_version"])
        except DamageError as error:
            if self.manifest() != manifest:  # a run has just finished and deleted this version
                return self.rows()
            raise ValueError(f"{error}; run the stage again") from error
        return self._live_rows(rows)

    def _live_rows(self, rows: pa.Table) -> pa.Table:
        return self.with_files(rows.filter(rows["live"]).select(self.schema.stored.names).cast(self.schema.stored))

    def with_files(self, rows: pa.Table, *, read: bool = False) -> pa.Table:
        """Those of `rows` whose shard and artifact have the right size. `read`: artifacts must also fit their checksums."""
        if self.schema.tensors and (damaged := damaged_shards(rows, self.shards, self.schema)):
            rows = rows.filter(pc.invert(pc.is_in(rows["shard"], pa.array(sorted(damaged), pa.string()))))
        if not self.schema.artifact:
            return rows
        check = self.checksums.damage if read else self.checksums.resized
        whole = [not check(f"artifacts/{name}") for name in rows[self.schema.artifact].to_pylist()]
        return rows if all(whole) else rows.filter(pa.array(whole, pa.bool_()))

    def set_aside(self, name: str) -> Path:
        """Move a damaged file to damaged/. The caller must hold the table's lock."""
        target = self.folder / "damaged" / name
        make_folder(target.parent)
        (self.folder / name).replace(target)
        self.checksums.forget([name])
        return target

    def set_aside_damaged(self) -> None:
        """Move damaged artifacts to damaged/, so that the stage writes them again. The caller must hold the table's lock."""
        # Not in subfolders: those files belong to rows, or to checkpoints, which record digests of their own.
        for path in (self.folder / "artifacts").glob("*"):
            if path.is_file() and self.damage_of(path):
                self.set_aside(self._name(path))

    def damage_of(self, path: Path) -> str:
        return self.checksums.damage(self._name(path))

    def record_files(self, paths: Iterable[Path]) -> None:
        known = self.checksums.known()
        names = {self._name(path): path for path in paths if path.is_file()}
        self.checksums.record({name: path for name, path in names.items() if name not in known})

    def record_shards(self, rows: pa.Table) -> None:
        self.record_files(self.shards / name for name in pc.unique(rows["shard"]).to_pylist())

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def rename_old_folders(self) -> None:
        for old, new in FOLDERS.items():
            if (self.folder / old).is_dir() and not (self.folder / new).exists():
                (self.folder / old).rename(self.folder / new)
                sync(self.folder)

    def manifest_is_valid(self, newest: int) -> bool:
        """True if the version that the manifest names can be read. `newest`: the newest version that can."""
        version = self.manifest()["lance_version"] if self.exists else None
        if version is None or version > newest:
            return False
        try:
            return version == newest or bool(self.index.read(version).num_columns)
        except DamageError:
            return False

    def committed(self) -> pa.Table:
        """The newest stored row of each key. `live` is null if the last finished run did not know the row."""
        return self.with_files(newest_per_key(self.index.read_newest(), self.schema.key))

    def reclaimable_bytes(self) -> int:
        """Estimate of what `Writer.collect` frees: unused parts of sparse shards, or artifacts that no row names."""
        rows = self.with_files(self.index.read_newest())
        if not self.exists:
            return 0
        kept = rows.filter(pc.fill_null(rows["live"], True))
        unnamed = sum(map(size_of, self.unnamed_files(kept, rows)))
        if not self.schema.tensors or not rows.num_rows:
            return unnamed
        return reclaimable_bytes(kept, self.shards, self.schema)

    def unnamed_files(self, rows: pa.Table, all_rows: pa.Table) -> list[Path]:
        """Artifacts that no row of `rows` names, sorted."""
        if not self.schema.artifact:
            return []
        root = self.folder / "artifacts"
        # Only folders with files of rows: those of checkpoints, and artifacts/ itself, hold files that no row names.
        folders = {(root / name).parent for name in all_rows[self.schema.artifact].to_pylist()} - {root}
        named = {root / name for name in rows[self.schema.artifact].to_pylist()}
        return sorted(path for folder in folders for path in folder.glob("[!.]*") if path not in named)

    def delete_files(self, paths: Iterable[Path]) -> None:
        gone = list(paths)
        for path in gone:
            path.unlink(missing_ok=True)
        self.checksums.forget(map(self._name, gone))

    def tensors(self, version: int | None = None) -> ShardReader:
        """Raises ValueError if a shard is missing or too short."""
        assert self.schema.tensors, f"{self.schema.name} has no tensors"
        return ShardReader(self.folder, self.rows(version), self.schema)

    def usage(self) -> dict[str, int]:
        manifest = self.manifest() if self.exists else {}
        shards = [path.stat().st_size for path in shard_files(self.shards)]
        return {
            "rows": manifest.get("rows", 0),
            "dead": manifest.get("dead", 0),
            "bytes": size_of(self.folder),
            "shard_bytes": sum(shards),
            "shards": len(shards),
        }


def manifest_checksum(manifest: dict[str, Any]) -> str:
    return text_checksum(json.dumps(manifest, sort_keys=True))
