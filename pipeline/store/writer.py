"""Writes one table: one writer at a time, every commit on the disk before it counts, the manifest last."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.disk import (
    DiskError,
    atomic_write,
    delete_temporary_files,
    explain_disk_errors,
    make_folder,
    size_of,
    sync,
)
from pipeline.store.index import LIVE
from pipeline.store.lock import Lock
from pipeline.store.repair import fill_checksums, reconcile, repack
from pipeline.store.rows import conform, matches, newest_per_key
from pipeline.store.shards import SHARD_BYTES, next_shard_number, rows_per_shard, shard_files, write_shard
from pipeline.store.table import TableFolder, manifest_checksum

FLUSH_SECONDS = 30.0  # as long as rows arrive, they are committed at least this often; a kill loses no more work
# 1,000 commits of 32 rows: 44 MB for 0.7 MB of rows, and a commit takes 4 to 7 ms instead of 1.5.
COMMITS = 64  # after this many commits the index is rewritten in one: Lance's manifests grow with every commit


class Writer:
    """The only writer of one table, as a context manager. Repairs what killed writers left; commits by size and by time.

    Raises ValueError if another process is writing the table.
    """

    def __init__(
        self,
        table: TableFolder,
        recipe: dict[str, Any],
        *,
        shard_bytes: int = SHARD_BYTES,
        flush_seconds: float = FLUSH_SECONDS,
    ) -> None:
        self.table = table
        self.schema = table.schema
        self.recipe = recipe
        self._shard_bytes = shard_bytes
        self._flush_seconds = flush_seconds
        self._lock = ExitStack()
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_bytes = 0
        self._buffered_since = 0.0
        self._rows = table.index.schema.empty_table()  # all rows of the index, older before newer
        self._version = 0  # of the index; 0 if there is none
        self._commits = 0  # since the index was last rewritten
        self._written_keys = [self._rows.select(self.schema.key)]  # of every row committed by this writer
        self._open = False
        self._failed = False

    def __enter__(self) -> Writer:
        with ExitStack() as lock, self._disk_errors():
            make_folder(self.table.folder)
            lock.enter_context(Lock(self.table.folder / "lock"))
            delete_temporary_files(self.table.folder)
            self.table.set_aside_damaged()
            self._repair()
            self._open = True
            self._lock = lock.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            if error is None:
                self.flush()
            elif not self._failed:  # the rows that the stage yielded before it failed are valid
                with suppress(ValueError):
                    self.flush()

    @property
    def stored(self) -> pa.Table:
        """The newest committed row of each key, without tensors; of killed runs too, and rows that are no longer wanted."""
        return newest_per_key(self._rows, self.schema.key).select(self.schema.stored.names).cast(self.schema.stored)

    @property
    def rows_written(self) -> int:
        return int(newest_per_key(pa.concat_tables(self._written_keys), self.schema.key).num_rows)

    @property
    def version(self) -> int:
        return self._version

    def append(self, batch: pa.RecordBatch) -> None:
        """A row replaces an older one with the same key. Raises ValueError if the batch does not fit the schema."""
        batch = conform(batch, self.schema)
        if not batch.num_rows:
            return
        if not self._buffer:
            self._buffered_since = time.monotonic()
        self._buffer.append(batch)
        self._buffered_bytes += batch.nbytes
        while self._buffered_bytes >= self._shard_bytes:
            self._commit()
        if time.monotonic() - self._buffered_since >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """After this call, neither a kill nor a power cut can lose the appended rows."""
        while self._buffer:
            self._commit()

    def write_artifact(self, name: str, write: Callable[[Path], None]) -> Path:
        """`write(path)` makes a file or folder at a temporary path, then renamed. Only a file may replace an existing one."""
        artifacts = self.table.folder / "artifacts"
        path = artifacts / name
        assert path.is_relative_to(artifacts) and ".." not in path.parts, f"{name} does not lie below artifacts/"
        with self._disk_errors(), atomic_write(path) as temporary:
            write(temporary)
            files = [each for each in (temporary, *temporary.rglob("*")) if each.is_file()]
            own = path.relative_to(self.table.folder)
            # Before the rename: if a kill comes between, the old file still agrees with its older record.
            self.table.checksums.record({(own / each.relative_to(temporary)).as_posix(): each for each in files})
        return path

    def finish(self, wanted: pa.Table | None, facts: dict[str, Any]) -> dict[str, Any]:
        """Publish the rows that equal a row of `wanted` in all its columns (None: all rows), and return the manifest.

        Other rows are deleted, or hidden if the table has tensors or `schema.retains_dead_rows`.
        """
        self.flush()
        rows = newest_per_key(self._rows, self.schema.key)
        live = pa.array([True] * rows.num_rows, pa.bool_()) if wanted is None else matches(rows, wanted, wanted.column_names)
        rows = rows.set_column(rows.schema.get_field_index(LIVE.name), LIVE, live)
        rows = rows if self.schema.tensors or self.schema.retains_dead_rows else rows.filter(live)
        old = self.table.manifest() if self.table.exists else None
        unchanged = self._version == self._published_version() and rows["live"].equals(self._rows["live"])
        facts = {**(old or {}).get("facts", {}), **json.loads(json.dumps(facts))}
        if old and unchanged and facts == old["facts"]:
            return old
        with self._disk_errors():
            if not unchanged:
                self._replace(rows.sort_by([(name, "ascending") for name in self.schema.key]))
            return self._publish(facts)

    def collect(self) -> int:
        """Delete rows that the last finished run did not want and files of no row, repack shards; returns the bytes freed."""
        self.flush()
        if not self.table.exists:
            return 0
        before = size_of(self.table.folder)
        with self._disk_errors():
            rows = (all_rows := self._rows).filter(pc.fill_null(self._rows["live"], True))
            obsolete: list[Path] = []
            if self.schema.tensors:
                rows, obsolete = repack(rows, self.table.shards, self.schema, self._shard_bytes)
                self.table.record_shards(rows)
            if obsolete or rows.num_rows < self._rows.num_rows:
                self._replace(rows)
                self._publish(self.table.manifest()["facts"])
            # After the commit that no longer names them.
            for path in obsolete:
                path.unlink()
            if obsolete:
                sync(self.table.shards)
            self.table.delete_files(self.table.unnamed_files(rows, all_rows))
        return max(0, before - size_of(self.table.folder))

    def _commit(self) -> None:
        rows = pa.Table.from_batches(self._buffer)
        count = rows_per_shard(rows, self.schema, self._shard_bytes)
        with self._disk_errors():
            stored = self._write_tensors(rows.slice(0, count)).append_column(LIVE, pa.nulls(count, pa.bool_()))
            self._version = self.table.index.append(stored)
            self._rows = pa.concat_tables([self._rows, stored])
            self._written_keys.append(stored.select(self.schema.key))
            self._buffer = rows.slice(count).to_batches()
            self._buffered_bytes = sum(batch.nbytes for batch in self._buffer)
            self._buffered_since = time.monotonic()
            self._commits += 1
            if self._commits >= COMMITS:
                self._replace(self._rows)
                self.table.index.prune(self._published_version())

    def _write_tensors(self, rows: pa.Table) -> pa.Table:
        if not self.schema.tensors:
            return rows
        stored = write_shard(self.table.shards, next_shard_number(self.table.shards), rows, self.schema)
        self.table.record_shards(stored)
        return stored

    def _replace(self, rows: pa.Table) -> None:
        self._version = self.table.index.replace(rows)
        self._rows = rows.combine_chunks()
        self._commits = 0

    def _publish(self, facts: dict[str, Any]) -> dict[str, Any]:
        live = self._rows["live"]
        shards = pc.unique(self._rows["shard"]).to_pylist() if self.schema.tensors else []
        size = size_of(self.table.folder / "artifacts") + self.table.index.data_bytes(self._version)
        manifest = {
            "table": self.schema.name,
            "recipe": self.recipe,
            "rows": pc.sum(live, min_count=0).as_py(),
            "dead": pc.sum(pc.invert(live), min_count=0).as_py(),
            "bytes": size + sum((self.table.shards / name).stat().st_size for name in shards),
            "lance_version": self._version,
            "facts": facts,
        }
        # Of what a reader parses, hence the round trip through JSON.
        manifest["checksum"] = manifest_checksum(json.loads(json.dumps(manifest)))
        with atomic_write(self.table.manifest_file) as temporary:
            temporary.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        # After the manifest: until then readers use the older version.
        self.table.index.prune(None)
        return self.table.manifest()

    def _published_version(self) -> int | None:
        return int(self.table.manifest()["lance_version"]) if self.table.exists else None

    def _repair(self) -> None:
        """Make folders, index, manifest, shards and artifacts agree after a kill, a power cut or an update of this program."""
        self.table.rename_old_folders()
        self._version, rows = self.table.index.recover()
        if self.table.manifest_file.exists() and not self.table.manifest_is_valid(self._version):
            self.table.manifest_file.unlink()  # before another version of the index gets the number that it names
            sync(self.table.folder)
        self._rows = reconcile(rows, self.table.shards, self.schema, self.table.damage_of) if self.schema.tensors else rows
        self._rows = self.table.with_files(self._rows, read=True)
        if self._rows is not rows or self.table.index.has_old_columns():
            self._replace(self._rows)

    def record_checksums(self) -> None:
        """For files and tensors of an earlier release, which have none."""
        self.flush()
        with self._disk_errors():
            if self.schema.tensors and any(self._rows[tensor.checksum].null_count for tensor in self.schema.tensors):
                self._replace(fill_checksums(self._rows, self.table.shards, self.schema))
                if self.table.exists and not self._rows["live"].null_count:  # no run is unfinished
                    self._publish(self.table.manifest()["facts"])
            self.table.record_files([*shard_files(self.table.shards), *(self.table.folder / "artifacts").rglob("*")])
            self.table.index.record_checksums()

    def remove(self, files: Iterable[str], keys: Collection[str]) -> None:
        """Set `files` aside and remove their rows and those of `keys` (first key column; empty for a table without tensors)."""
        self.flush()
        with self._disk_errors():
            for name in files:
                if (self.table.folder / name).is_file():
                    self.table.set_aside(name)
            rows = self.table.with_files(self._rows)
            if keys:
                rows = rows.filter(pc.invert(pc.is_in(rows[self.schema.key[0]], pa.array(sorted(keys), pa.string()))))
            if rows.num_rows < self._rows.num_rows:
                self._replace(rows)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Raise disk errors as a DiskError with one line. A writer that met one commits nothing more when it is closed."""

        def saved() -> str:
            return f"{self.stored.num_rows} rows are kept" if self._open else "the table is unchanged"

        try:
            with explain_disk_errors(self.schema.name, self.table.folder, saved, lambda: max(self._buffered_bytes, 1)):
                yield
        except DiskError:
            self._failed = True
            raise
