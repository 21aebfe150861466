"""One table on disk: its folder, its manifest, and what a reader sees. `writer` is how it changes.

tables/<stage_name>/<recipe>/
    manifest.json    appears last: without it the table has no readers
    rows.lance/      the rows, and in `live` whether anyone wants them: true, false, or null before a run has finished
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
from pipeline.store.index import LIVE, Damaged, Index
from pipeline.store.repair import spare
from pipeline.store.rows import missing, newest
from pipeline.store.shards import SHARD_BYTES, ShardReader
from pipeline.store.writer import FLUSH_SECONDS, Writer
from schemas.renames import FOLDERS
from schemas.table import TableSchema

__all__ = ["TableFolder", "Writer", "missing"]


class TableFolder:
    """The table of one stage_name and one recipe, there or not."""

    def __init__(self, folder: Path, schema: TableSchema) -> None:
        self.folder = folder
        self.schema = schema
        self.index = Index(folder / "rows.lance", schema.stored.append(LIVE))

    @property
    def shards(self) -> Path:
        """The folder of the tensors; a table that an earlier version wrote has it under another name until the next run."""
        folder = self.folder / "shards"
        old = [self.folder / name for name, new in FOLDERS.items() if new == folder.name]
        return next((path for path in old if path.is_dir() and not folder.exists()), folder)

    @property
    def exists(self) -> bool:
        """Whether a readable manifest is there."""
        try:
            self.manifest()
        except ValueError:
            return False
        return True

    @property
    def fits(self) -> bool:
        """Whether the table is there and has the columns of today: an earlier version may have written others."""
        if not self.exists:
            return False
        columns = self.manifest().get("recipe", {}).get("columns")
        return columns is None or columns == {field.name: str(field.type) for field in self.schema.batch}

    def manifest(self) -> dict[str, Any]:
        """What the last finished run left: recipe, counts, the Lance version to read, facts. ValueError if there is none."""
        path = self.folder / "manifest.json"
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
        """The live rows, schema `schema.stored`, as the last finished run left them, or as they were in a Lance version.

        Rows of a run in progress, or of one that was killed, are not among them. ValueError if the table cannot be read.
        """
        if version is not None:
            return self._live(self.index.read(version))
        manifest = self.manifest()
        try:
            rows = self.index.read(manifest["lance_version"])
        except Damaged as error:
            if self.manifest() != manifest:  # a writer finished just now and cleaned the version away
                return self.rows()
            raise ValueError(f"{error}; run the stage again") from error
        return self._live(rows)

    def _live(self, rows: pa.Table) -> pa.Table:
        return rows.filter(rows["live"]).select(self.schema.stored.names).cast(self.schema.stored)

    def committed(self) -> pa.Table:
        """Every committed row with its column `live`, the newest of each key: of a run in progress or killed, too."""
        return newest(self.index.newest(), self.schema.key)

    def reclaimable(self) -> int:
        """About how many bytes `Writer.collect` would free."""
        rows = self.index.newest()
        if not self.exists or not self.schema.tensors or not rows.num_rows:
            return 0
        return spare(rows.filter(pc.fill_null(rows["live"], True)), self.shards, self.schema)

    def tensors(self, version: int | None = None) -> ShardReader:
        """A reader of the tensors of `rows(version)`. ValueError if a shard is missing or too short."""
        assert self.schema.tensors, f"{self.schema.name} has no tensors"
        return ShardReader(self.shards, self.rows(version), self.schema)

    def usage(self) -> dict[str, int]:
        """Counts and bytes: `rows`, `dead` (rows nobody wants), `bytes` (all files), `shard_bytes`, `parts`."""
        manifest = self.manifest() if self.exists else {}
        parts = [path.stat().st_size for path in self.shards.glob("*.arrow")]
        return {
            "rows": manifest.get("rows", 0),
            "dead": manifest.get("dead", 0),
            "bytes": size_of(self.folder),
            "shard_bytes": sum(parts),
            "parts": len(parts),
        }

    def writer(self, recipe: dict[str, Any], *, shard_bytes: int = SHARD_BYTES, flush_seconds: float = FLUSH_SECONDS) -> Writer:
        """A context in which the table may change; it begins by mending what killed ones left. ValueError if another has it."""
        return Writer(self, recipe, shard_bytes, flush_seconds)
