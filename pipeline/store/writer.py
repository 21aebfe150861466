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

FLUSH_SECONDS = 30.0  # rows are committed at least this often, so a kill loses no more work
COMMITS = 64  # after this many commits the index is rewritten in one: Lance's manifests grow with every commit


class Writer:
    """The only writer of one table, used as `with Writer(table, recipe) as writer:`. On entry, it locks the table and
    repairs what killed writers left. Rows are added with `append`. They are buffered, and the end of the `with` block
    commits the rest. Raises ValueError if another process is writing the table.

    `recipe` holds the settings, code version and weights that the rows depend on. It is written to the manifest. A call
    of `append` commits rows once the buffer holds `shard_bytes` bytes. It commits all of them once `flush_seconds`
    seconds have passed since the first buffered row or the last commit.
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
        """The table of all committed rows, without their tensors. The columns are those of `schema.stored`, with the
        position of each tensor. Rows of killed runs and rows that are no longer wanted are included. If several rows
        have the same key (the columns that identify a row), only the newest is included.
        """
        return newest_per_key(self._rows, self.schema.key).select(self.schema.stored.names).cast(self.schema.stored)

    @property
    def rows_written(self) -> int:
        """The number of rows that this writer has committed. Rows with the same key count as one."""
        return int(newest_per_key(pa.concat_tables(self._written_keys), self.schema.key).num_rows)

    @property
    def version(self) -> int:
        """The version of the index of committed rows. It rises with every commit; 0 if no row was committed yet."""
        return self._version

    def append(self, batch: pa.RecordBatch) -> None:
        """Add a batch of rows to the buffer of rows to commit. The columns are those of `schema.batch`, tensors included. A
        row replaces an older row with the same key. Raises ValueError if the batch does not fit the schema. Rows are
        committed when the buffer is full; call `flush` to commit at once.
        """
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
        """Commit all appended rows. After this call, neither a kill nor a power cut can lose them."""
        while self._buffer:
            self._commit()

    def write_artifact(self, name: str, write: Callable[[Path], None]) -> Path:
        """Write one artifact of the table, and return its final path. An artifact is a file or a folder, such as an
        image or a checkpoint. `name` is its path relative to the table's folder `artifacts`. `write(path)` must create
        a file or a folder at the temporary path `path`. This is then renamed to the final path. A file may replace an
        existing file. A folder needs a new name. If `write` raises, an existing file stays unchanged.
        """
        artifacts = self.table.folder / "artifacts"
        path = artifacts / name
        assert path.is_relative_to(artifacts) and ".." not in path.parts, f"{name} does not lie below artifacts/"
        with self._disk_errors(), atomic_write(path) as temporary:
            write(temporary)
            files = [each for each in (temporary, *temporary.rglob("*")) if each.is_file()]
            own = path.relative_to(self.table.folder)
            self.table.checksums.record({(own / each.relative_to(temporary)).as_posix(): each for each in files})
        return path

    def finish(self, wanted: pa.Table | None, facts: dict[str, Any]) -> dict[str, Any]:
        """Publish the table, so that readers see its wanted rows, and return the manifest. If `wanted` is None, every row is
        wanted. Otherwise, `wanted` has some of the table's columns. A row is wanted if some row of `wanted` has equal values in
        all these columns. For example, if `wanted` has only the column `step`, with the values 1 and 2, all rows of steps 1 and
        2 are wanted. `facts` are added to the facts in the manifest. A fact of the same name is replaced.

        Rows that are not wanted are deleted, except in tables with tensors and in tables with `schema.retains_dead_rows`, which
        hide them. The manifest is not rewritten if nothing has changed.
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
        """Delete the rows that the last finished run did not want, and the files that no remaining row refers to.
        Also rewrite shards (Arrow files with tensors) that are mostly unused. Return how many bytes were freed. Rows of
        an unfinished run are kept. If no run has finished yet, nothing is deleted.
        """
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
            for path in obsolete:
                path.unlink()
            if obsolete:
                sync(self.table.shards)
            self.table.delete_files(self.table.unnamed_files(rows, all_rows))
        return max(0, before - size_of(self.table.folder))

    def _commit(self) -> None:
        """Commit the first buffered rows: as many as fit into one shard, but at least one."""
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
        """Write the tensors of the rows to a new shard (an Arrow file). Return the rows as the index stores them, with
        the columns of `schema.stored`. If the table has no tensors, nothing is written and `rows` is returned.
        """
        if not self.schema.tensors:
            return rows
        stored = write_shard(self.table.shards, next_shard_number(self.table.shards), rows, self.schema)
        self.table.record_shards(stored)
        return stored

    def _replace(self, rows: pa.Table) -> None:
        """Rewrite the index with `rows`, in one commit."""
        self._version = self.table.index.replace(rows)
        self._rows = rows.combine_chunks()
        self._commits = 0

    def _publish(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Write the manifest, so that readers see the newest version of the index. Then delete all older versions. `facts` are
        the manifest's facts. Return the manifest.
        """
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
        manifest["checksum"] = manifest_checksum(json.loads(json.dumps(manifest)))
        with atomic_write(self.table.manifest_file) as temporary:
            temporary.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        self.table.index.prune(None)
        return self.table.manifest()

    def _published_version(self) -> int | None:
        """Return the number of the index version that readers see. It is the version that the last finished run
        published. Return None if no run has finished.
        """
        return int(self.table.manifest()["lance_version"]) if self.table.exists else None

    def _repair(self) -> None:
        """Bring the table into a consistent state after a kill, a power cut or an update of this program. Folders and
        columns that have names of earlier versions are renamed. The newest versions of the index are deleted until one
        can be read. A manifest is deleted if the version that it names cannot be read. Rows with a damaged or missing
        shard or artifact are removed from the index. Newer rows in the shards are added to it.
        """
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
        """Record checksums for all files and tensors of the table that have none. Appended rows are committed first.

        Files and tensors of an earlier release have no checksums.
        """
        self.flush()
        with self._disk_errors():
            if self.schema.tensors and any(self._rows[tensor.checksum].null_count for tensor in self.schema.tensors):
                self._replace(fill_checksums(self._rows, self.table.shards, self.schema))
                if self.table.exists and not self._rows["live"].null_count:  # no run is unfinished
                    self._publish(self.table.manifest()["facts"])
            self.table.record_files([*shard_files(self.table.shards), *(self.table.folder / "artifacts").rglob("*")])
            self.table.index.record_checksums()

    def remove(self, files: Iterable[str], keys: Collection[str]) -> None:
        """Remove damaged files and rows, so that the next run of the stage writes them again. `files` are paths relative to the
        table's folder. These files are moved to the folder `damaged`. The rows that need them are removed. `keys` are values of
        the first key column (text). Rows with these values are removed too. For a table without tensors, `keys` must be empty.

        A row is also removed if its shard or artifact is missing or has another size.
        """
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
        """Return a context manager for work on the disk. A system error in its block, such as a full disk, is raised as a
        `DiskError` with one line for the user. The flag `_failed` is then set.

        A writer whose flag is set commits no buffered rows when it is closed.
        """

        def saved() -> str:
            return f"{self.stored.num_rows} rows are kept" if self._open else "the table is unchanged"

        try:
            with explain_disk_errors(self.schema.name, self.table.folder, saved, lambda: max(self._buffered_bytes, 1)):
                yield
        except DiskError:
            self._failed = True
            raise
