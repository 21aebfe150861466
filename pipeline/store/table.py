"""A table on disk as readers see it: its folder, its manifest, its rows and tensors. `Writer` changes it.

tables/<stage>/<recipe>/
    manifest.json    written last: a table without it has no readers
    rows.lance/      the rows; the column `live` is true (wanted), false (not wanted any more) or null (run not finished)
    shards/*.arrow   tensor tables only: the rows again, with their tensors
    artifacts/       files that rows name
    lock             who is writing
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.disk import size_of
from pipeline.store.index import LIVE, DamageError, Index
from pipeline.store.reader import ShardReader
from pipeline.store.repair import reclaimable_bytes
from pipeline.store.rows import newest_per_key
from pipeline.store.shards import shards_folder
from schemas.table import TableSchema


class TableFolder:
    """The table of one stage for one recipe, opened for reading. A recipe describes the settings, weights and inputs
    that the rows depend on. `folder` is the table's own folder. It need not exist yet. `schema` is the table's schema.
    """

    def __init__(self, folder: Path, schema: TableSchema) -> None:
        self.folder = folder
        self.schema = schema
        self.index = Index(folder / "rows.lance", schema.stored.append(LIVE))

    @property
    def shards(self) -> Path:
        """The folder of the table's shards (Arrow files with tensors). A table written by an earlier version has it under its
        old name until the next run.
        """
        return shards_folder(self.folder)

    @property
    def manifest_file(self) -> Path:
        """The path of the table's manifest.json. The file exists once a run has finished."""
        return self.folder / "manifest.json"

    @property
    def exists(self) -> bool:
        """True if a run has finished this table. Its manifest can then be read."""
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
        return columns is None or columns == {field.name: str(field.type) for field in self.schema.batch}

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of the last finished run as a dict. `recipe` holds everything that decides what the stage
        computes. `rows` is the number of rows that readers see. `dead` is the number of stored rows that the last
        finished run did not want. Readers do not see them. `bytes` is the size of the index, the shards and the
        artifacts, in bytes. `lance_version` is the version of the index that readers see. `facts` holds facts about the
        run, such as its duration. Raises ValueError if no run has finished, or if the file is damaged.
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
        return found

    def rows(self, version: int | None = None) -> pa.Table:
        """Return the rows that readers see, without their tensors. The columns are those of `schema.stored`. They
        include the shard, the offset and the size of each tensor. If `version` is given, the rows are read from this
        version of the Lance dataset. If it is None, they are those of the last finished run. Rows of an unfinished run
        are left out. A call with `version` raises DamageError if that version cannot be read. A call without it raises
        ValueError if no run has finished or the rows are damaged.
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
        return rows.filter(rows["live"]).select(self.schema.stored.names).cast(self.schema.stored)

    def committed(self) -> pa.Table:
        """Return all committed rows, including those of an unfinished run. The columns are those of `rows()` and one
        more, `live`. `live` is True for rows that readers see. It is False for rows that the last finished run did not
        want. It is null for rows written since then. If a key has several rows, only the newest is returned.
        """
        return newest_per_key(self.index.read_newest(), self.schema.key)

    def reclaimable_bytes(self) -> int:
        """Return about how many bytes `Writer.collect` would free by rewriting shards. Return 0 if the table has no tensors or
        no run has finished.
        """
        rows = self.index.read_newest()
        if not self.exists or not self.schema.tensors or not rows.num_rows:
            return 0
        return reclaimable_bytes(rows.filter(pc.fill_null(rows["live"], True)), self.shards, self.schema)

    def tensors(self, version: int | None = None) -> ShardReader:
        """Return a reader of the tensors of `rows(version)`. None means the last finished run. Raises ValueError if a shard (an
        Arrow file with tensors) is missing or too short.
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
        shards = [path.stat().st_size for path in self.shards.glob("*.arrow")]
        return {
            "rows": manifest.get("rows", 0),
            "dead": manifest.get("dead", 0),
            "bytes": size_of(self.folder),
            "shard_bytes": sum(shards),
            "shards": len(shards),
        }
