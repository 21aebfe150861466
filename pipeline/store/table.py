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
    """The table of one stage, opened for reading. `folder` is the table's own folder. It need not exist yet. `schema`
    is the table's schema.

    There is one folder for each recipe. A recipe records the settings, weights and inputs that the rows depend on.
    """

    def __init__(self, folder: Path, schema: TableSchema) -> None:
        self.folder = folder
        self.schema = schema
        self.index = Index(folder / "rows.lance", schema.stored.append(LIVE))
        self.checksums = self.index.checksums

    @property
    def shards(self) -> Path:
        """The folder with the table's shards (Arrow files with tensors).

        A table that an earlier version wrote may still have its old folder name until the next run.
        """
        return shards_folder(self.folder)

    @property
    def manifest_file(self) -> Path:
        """The path of the table's manifest.json. The file exists once a run has finished."""
        return self.folder / "manifest.json"

    @property
    def exists(self) -> bool:
        """True if a run has finished writing this table. The table then has a readable manifest."""
        try:
            self.manifest()
        except ValueError:
            return False
        return True

    @property
    def has_current_columns(self) -> bool:
        """True if the table exists and has the columns of its schema. It is False for a table that an earlier version of this
        program wrote with other columns.
        """
        if not self.exists:
            return False
        columns = self.manifest().get("recipe", {}).get("columns")
        return columns is None or columns == self.schema.recorded

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of the last finished run: a dict that describes the table. `recipe` holds what decides
        the stage's result. `rows` is the number of rows that readers see. `dead` is the number of stored rows that they
        do not see. `bytes` is the size of the index, shards and artifacts. `lance_version` is the version of the index
        that readers see. `facts` describes the run. Raises ValueError if no run has finished or the file is damaged.

        Readers do not see the rows that the last finished run did not want.
        """
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
        if checksum != manifest_checksum(found) and (checksum is not None or found.keys() - MANIFEST):
            raise ValueError(f"{path} is damaged (it differs from its checksum); run the stage again")
        return found

    def rows(self, version: int | None = None) -> pa.Table:
        """Return the rows that readers see, without their tensors, as a table with the columns of `schema.stored`.
        These include the shard, the offset and the size of each tensor. `version` is a version of the Lance dataset.
        None means that of the last finished run. Raises DamageError if the given version cannot be read. Raises
        ValueError if no run has finished or its rows are damaged.

        Rows of an unfinished run are left out, and so are rows whose shard or artifact is missing or has another size.
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
        """Return those of the table's rows `rows` whose files exist and have the right size. The files of a row are its
        shard (an Arrow file with tensors) and its artifact (a file that the row names). If `read` is True, the
        artifacts are also compared with their checksums.
        """
        if self.schema.tensors and (damaged := damaged_shards(rows, self.shards, self.schema)):
            rows = rows.filter(pc.invert(pc.is_in(rows["shard"], pa.array(sorted(damaged), pa.string()))))
        if not self.schema.artifact:
            return rows
        check = self.checksums.damage if read else self.checksums.resized
        whole = [not check(f"artifacts/{name}") for name in rows[self.schema.artifact].to_pylist()]
        return rows if all(whole) else rows.filter(pa.array(whole, pa.bool_()))

    def set_aside(self, name: str) -> Path:
        """Move a damaged file of the table to the folder `damaged`, and return its new path. `name` is relative to the table's
        folder. The caller must hold the table's lock.
        """
        target = self.folder / "damaged" / name
        make_folder(target.parent)
        (self.folder / name).replace(target)
        self.checksums.forget([name])
        return target

    def set_aside_damaged(self) -> None:
        """Move damaged artifacts to the folder `damaged`, so that the stage writes them again. An artifact is damaged
        if it differs from its checksum. Only files directly in the folder `artifacts` are checked. The caller must hold
        the table's lock.

        Files in subfolders are not moved. Rows refer to some of them. The others belong to checkpoints, and each
        checkpoint records digests of its own files.
        """
        for path in (self.folder / "artifacts").glob("*"):
            if path.is_file() and self.damage_of(path):
                self.set_aside(self._name(path))

    def damage_of(self, path: Path) -> str:
        """Return in words what is wrong with a file of the table, such as "is missing". Return "" if the file is
        intact. An existing file without a recorded checksum counts as intact. `path` must lie in the table's folder.
        """
        return self.checksums.damage(self._name(path))

    def record_files(self, paths: Iterable[Path]) -> None:
        """Record the checksums of files of the table, such as shards (Arrow files with tensors). Files with a recorded
        checksum and missing files are skipped. `paths` are the paths of these files, inside the table's folder.
        """
        known = self.checksums.known()
        names = {self._name(path): path for path in paths if path.is_file()}
        self.checksums.record({name: path for name, path in names.items() if name not in known})

    def record_shards(self, rows: pa.Table) -> None:
        """Record the checksums of the shards that hold the tensors of `rows`. A shard is an Arrow file in the table's
        folder. Shards with a recorded checksum are not read again. `rows` needs the column `shard`.
        """
        self.record_files(self.shards / name for name in pc.unique(rows["shard"]).to_pylist())

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def rename_old_folders(self) -> None:
        """Rename folders of the table that an earlier version named differently, such as parts/ to shards/. A folder is
        left as it is if its new name exists.
        """
        for old, new in FOLDERS.items():
            if (self.folder / old).is_dir() and not (self.folder / new).exists():
                (self.folder / old).rename(self.folder / new)
                sync(self.folder)

    def manifest_is_valid(self, newest: int) -> bool:
        """Return True if the table has a readable manifest and the index version that the manifest names can be read.
        The index holds the table's rows, and every commit makes a new version of the index. `newest` is the number of
        the newest version that can be read. If the manifest names a version above `newest`, the result is False.

        The version `newest` counts as readable without another look. An older version is read to find out.
        """
        version = self.manifest()["lance_version"] if self.exists else None
        if version is None or version > newest:
            return False
        try:
            return version == newest or bool(self.index.read(version).num_columns)
        except DamageError:
            return False

    def committed(self) -> pa.Table:
        """Return the newest stored row of every key, including rows of an unfinished run. The columns are those of
        `rows()` and one more, `live`. `live` is True if the last finished run wanted the row. `live` is False if this
        run did not want the row, so readers do not see the row. `live` is null if the row was written after this run.

        Before the first run has finished, `live` is null in all rows. `live` is also null in rows that a repair took
        from the shards because the index lacked these rows. Rows whose shard or artifact is missing or has another size
        are left out.
        """
        return self.with_files(newest_per_key(self.index.read_newest(), self.schema.key))

    def reclaimable_bytes(self) -> int:
        """Estimate how many bytes of disk `Writer.collect` would free, and return the number. `Writer.collect` deletes
        the rows that the last finished run did not want. For a table with tensors, the estimate counts the unused bytes
        of shards (Arrow files with tensors) that are mostly unused. For a table without tensors, the estimate is the
        size of the artifacts (files that rows name) that no remaining row names. Return 0 if no run has finished.
        """
        rows = self.with_files(self.index.read_newest())
        if not self.exists:
            return 0
        kept = rows.filter(pc.fill_null(rows["live"], True))
        unnamed = sum(map(size_of, self.unnamed_files(kept, rows)))
        if not self.schema.tensors or not rows.num_rows:
            return unnamed
        return reclaimable_bytes(kept, self.shards, self.schema)

    def unnamed_files(self, rows: pa.Table, all_rows: pa.Table) -> list[Path]:
        """Return the paths of the artifacts that no row of `rows` names, sorted. An artifact is a file below the
        table's folder `artifacts`. `rows` are the rows that remain in the table. `all_rows` are all stored rows,
        including `rows`. Only subfolders of `artifacts` that hold the file of a row of `all_rows` are searched. If the
        table has no column for artifacts, the list is empty.

        For example, a row of `all_rows` names "a/1.png", and a row of `rows` names "a/2.png". Then all files in the
        folder `a` are returned except "a/2.png". Other subfolders, such as those of checkpoints, are not searched.
        Files directly in `artifacts` are not listed. A folder inside a searched folder is listed like a file. Names
        that begin with a dot are skipped.
        """
        if not self.schema.artifact:
            return []
        root = self.folder / "artifacts"
        folders = {(root / name).parent for name in all_rows[self.schema.artifact].to_pylist()} - {root}
        named = {root / name for name in rows[self.schema.artifact].to_pylist()}
        return sorted(path for folder in folders for path in folder.glob("[!.]*") if path not in named)

    def delete_files(self, paths: Iterable[Path]) -> None:
        """Delete files of the table and their checksums. `paths` are the paths of the files. The caller must hold the
        table's lock.
        """
        gone = list(paths)
        for path in gone:
            path.unlink(missing_ok=True)
        self.checksums.forget(map(self._name, gone))

    def tensors(self, version: int | None = None) -> ShardReader:
        """Return a reader of the tensors of the rows that `rows(version)` returns. `version` None means the last
        finished run. Raises ValueError if a shard (an Arrow file with tensors) is missing or too short.
        """
        assert self.schema.tensors, f"{self.schema.name} has no tensors"
        return ShardReader(self.folder, self.rows(version), self.schema)

    def usage(self) -> dict[str, int]:
        """Return the counts and sizes of the table as a dict. `rows` is the number of rows that readers see. `dead` is
        the number of stored rows that the last finished run did not want. Both are 0 if no run has finished. `shards`
        is the number of shard files, and `shard_bytes` is their size in bytes. `bytes` is the size of all files in the
        table's folder.
        """
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
    """Return the checksum of a table's manifest, as 16 hex digits. `manifest` is the manifest without its entry
    "checksum".
    """
    return text_checksum(json.dumps(manifest, sort_keys=True))
