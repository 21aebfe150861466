"""One table on disk: its folder, its manifest, and what a reader sees. `writer` is how it changes.

tables/<stage_name>/<recipe>/
    manifest.json    appears last: without it the table has no readers
    rows.lance/      the rows, and in `live` whether anyone wants them: true, false, or null before a run has finished
    parts/*.arrow    tensor tables only: the rows again, with their tensors
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
from schemas.table import TableSchema

__all__ = ["TableFolder", "Writer", "missing"]


class TableFolder:
    """The table of one stage_name and one recipe, there or not."""

    def __init__(self, folder: Path, schema: TableSchema) -> None:
        self.folder = folder
        self.schema = schema
        self.index = Index(folder / "rows.lance", schema.stored.append(LIVE))

    @property
    def parts(self) -> Path:
        """The folder of the tensors."""
        return self.folder / "parts"

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

    def rows(self) -> pa.Table:
        """The live rows, `schema.stored`, as the last finished run left them. A run in progress or killed is not seen."""
        manifest = self.manifest()
        try:
            rows = self.index.read(manifest["lance_version"])
        except Damaged as error:
            if self.manifest() != manifest:  # a writer finished just now and cleaned the version away
                return self.rows()
            raise ValueError(f"{error}; run the stage again") from error
        return rows.filter(rows["live"]).select(self.schema.stored.names).cast(self.schema.stored)

    def committed(self) -> pa.Table:
        """Every committed row with its column `live`, the newest of each key: of a run in progress or killed, too."""
        return newest(self.index.newest(), self.schema.key)

    def reclaimable(self) -> int:
        """About how many bytes `Writer.collect` would free."""
        rows = self.index.newest()
        if not self.exists or not self.schema.tensor or not rows.num_rows:
            return 0
        return spare(rows.filter(pc.fill_null(rows["live"], True)), self.parts, self.schema)

    def tensors(self) -> ShardReader:
        """The tensors of `rows()`. ValueError if a part is missing or too short."""
        assert self.schema.tensor, f"{self.schema.name} has no tensors"
        return ShardReader(self.parts, self.rows(), self.schema.key[0])

    def usage(self) -> dict[str, int]:
        """Counts and bytes: `rows`, `dead` (rows nobody wants), `bytes` (all files), `shard_bytes`, `parts`."""
        manifest = self.manifest() if self.exists else {}
        parts = [path.stat().st_size for path in self.parts.glob("*.arrow")]
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
