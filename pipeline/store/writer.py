"""Changes one table: one writer at a time, every commit on the disk before it counts, the manifest last."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.disk import DiskError, make_folder, size_of, sweep, sync, whole, writing
from pipeline.store.index import LIVE, Damaged
from pipeline.store.lock import Lock
from pipeline.store.repair import agreeing, repacked
from pipeline.store.rows import conform, matches, newest
from pipeline.store.shards import next_number, write_shard
from schemas.renames import FOLDERS

if TYPE_CHECKING:
    from pipeline.store.table import TableFolder

FLUSH_SECONDS = 30.0  # a kill costs at most so much work
COMMITS = 64  # after so many, the index is written anew as one: Lance's manifests grow with every commit


class Writer:
    """What `TableFolder.writer` gives: a context manager that holds the lock and begins by mending what it finds."""

    def __init__(self, table: TableFolder, recipe: dict[str, Any], shard_bytes: int, flush_seconds: float) -> None:
        self.table = table
        self.schema = table.schema
        self.recipe = recipe
        self._shard_bytes = shard_bytes
        self._flush_seconds = flush_seconds
        self._held = ExitStack()
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_bytes = 0
        self._buffered_since = 0.0
        self._rows = table.index.schema.empty_table()  # every row of the index in order of writing: a later one is newer
        self._version = 0  # of the index; 0 if there is none
        self._commits = 0
        self._open = False
        self._failed = False

    def __enter__(self) -> Writer:
        with ExitStack() as held, self._writing():
            make_folder(self.table.folder)
            held.enter_context(Lock(self.table.folder / "lock"))
            sweep(self.table.folder)
            self._repair()
            self._open = True
            self._held = held.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._held:
            if error is None:
                self.flush()
            elif not self._failed:  # what the stage made before it failed is good
                with suppress(ValueError):
                    self.flush()

    @property
    def stored(self) -> pa.Table:
        """Every committed row, the newest of each key, `schema.stored`: of killed runs too, and those nobody wants now."""
        return newest(self._rows, self.schema.key).select(self.schema.stored.names).cast(self.schema.stored)

    def append(self, batch: pa.RecordBatch) -> None:
        """Take rows of `schema.batch`; they are committed with others when a part is full or has waited long enough."""
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
        """Commit what was appended. Once it returns, those rows outlive a kill and a power cut."""
        while self._buffer:
            self._commit()

    def write_artifact(self, name: str, write: Callable[[Path], None]) -> Path:
        """An artifact, written by `write` to the path it is given: there whole, or as it was before."""
        artifacts = self.table.folder / "artifacts"
        path = artifacts / name
        assert path.is_relative_to(artifacts) and ".." not in path.parts, f"{name} does not lie below artifacts/"
        with self._writing(), whole(path) as temporary:
            write(temporary)
        return path

    def finish(self, live: pa.Table | None, facts: dict[str, Any]) -> dict[str, Any]:
        """Show the table to readers: rows that equal one of `live` in its columns (None: every row). Returns the manifest.

        Rows that are no longer wanted are dropped, except in tensor tables and where `schema.retains_dead_rows`.
        `facts` are added to those of the manifest, which is left alone if there is nothing new.
        """
        self.flush()
        rows = newest(self._rows, self.schema.key)
        wanted = pa.array([True] * rows.num_rows, pa.bool_()) if live is None else matches(rows, live, live.column_names)
        rows = rows.set_column(rows.schema.get_field_index(LIVE.name), LIVE, wanted)
        rows = rows if self.schema.tensors or self.schema.retains_dead_rows else rows.filter(wanted)
        old = self.table.manifest() if self.table.exists else None
        same = self._version == self._pinned() and rows["live"].equals(self._rows["live"])
        told = {**(old or {}).get("facts", {}), **json.loads(json.dumps(facts))}
        if old and same and told == old["facts"]:
            return old
        with self._writing():
            if not same:
                self._replace(rows.sort_by([(name, "ascending") for name in self.schema.key]))
            return self._publish(told)

    def collect(self) -> int:
        """Forget the rows that the last finished run did not want, and free their place. Returns the bytes freed."""
        self.flush()
        if not self.table.exists:
            return 0  # no run has finished: nobody can say what is wanted
        before = size_of(self.table.folder)
        with self._writing():
            rows = self._rows.filter(pc.fill_null(self._rows["live"], True))
            doomed: list[Path] = []
            if self.schema.tensors:
                rows, doomed = repacked(rows, self.table.shards, self.schema, self._shard_bytes)
            if doomed or rows.num_rows < self._rows.num_rows:
                self._replace(rows)
                self._publish(self.table.manifest()["facts"])
            for path in doomed:
                path.unlink()
            if doomed:
                sync(self.table.shards)
        return max(0, before - size_of(self.table.folder))

    def _commit(self) -> None:
        """Commit as many of the buffered rows as one part holds."""
        rows = pa.Table.from_batches(self._buffer)
        count = self._fitting(rows)
        with self._writing():
            stored = self._store(rows.slice(0, count)).append_column(LIVE, pa.nulls(count, pa.bool_()))
            self._version = self.table.index.append(stored)
            self._rows = pa.concat_tables([self._rows, stored])
            self._buffer = rows.slice(count).to_batches()
            self._buffered_bytes = sum(batch.nbytes for batch in self._buffer)
            self._buffered_since = time.monotonic()
            self._commits += 1
            if self._commits >= COMMITS:
                self._replace(self._rows)
                self.table.index.prune(self._pinned())

    def _fitting(self, rows: pa.Table) -> int:
        if not self.schema.tensors:
            return int(rows.num_rows)
        sizes = [tensor.kind.byte_width * pc.list_value_length(rows[tensor.name]).to_numpy() for tensor in self.schema.tensors]
        ends = np.cumsum(np.sum(sizes, axis=0), dtype=np.int64)
        return max(1, int(np.searchsorted(ends, self._shard_bytes, "right")))

    def _store(self, rows: pa.Table) -> pa.Table:
        if not self.schema.tensors:
            return rows
        return write_shard(self.table.shards, next_number(self.table.shards), rows, self.schema)

    def _replace(self, rows: pa.Table) -> None:
        self._version = self.table.index.replace(rows)
        self._rows = rows.combine_chunks()
        self._commits = 0

    def _publish(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Put the manifest in place, then let go of what only older ones named."""
        live = self._rows["live"]
        named = pc.unique(self._rows["shard"]).to_pylist() if self.schema.tensors else []
        held = size_of(self.table.folder / "artifacts") + self.table.index.data_bytes(self._version)
        manifest = {
            "table": self.schema.name,
            "recipe": self.recipe,
            "rows": pc.sum(live, min_count=0).as_py(),
            "dead": pc.sum(pc.invert(live), min_count=0).as_py(),
            "bytes": held + sum((self.table.shards / name).stat().st_size for name in named),
            "lance_version": self._version,
            "facts": facts,
        }
        with whole(self._manifest) as temporary:
            temporary.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        self.table.index.prune(None)
        return self.table.manifest()

    def _pinned(self) -> int | None:
        """The version that readers see, if any."""
        return int(self.table.manifest()["lance_version"]) if self.table.exists else None

    def _repair(self) -> None:
        """Take up what earlier writers left: step back from an unreadable index, then make index and parts agree."""
        self._adopt_old_folders()
        self._version, rows = self.table.index.recover()
        if self._manifest.exists() and not self._manifest_is_valid():
            self._manifest.unlink()  # before another version gets the number that it names
            sync(self._manifest.parent)
        self._rows = agreeing(rows, self.table.shards, self.schema) if self.schema.tensors else rows
        if self._rows is not rows or self.table.index.has_old_columns():
            self._replace(self._rows)

    def _adopt_old_folders(self) -> None:
        """Give the folders that an earlier version wrote their names of today."""
        for old, new in FOLDERS.items():
            if (self.table.folder / old).is_dir() and not (self.table.folder / new).exists():
                (self.table.folder / old).rename(self.table.folder / new)
                sync(self.table.folder)

    def _manifest_is_valid(self) -> bool:
        pinned = self._pinned()
        if pinned is None or pinned > self._version:
            return False
        try:
            return pinned == self._version or bool(self.table.index.read(pinned).num_columns)
        except Damaged:
            return False

    @property
    def _manifest(self) -> Path:
        return self.table.folder / "manifest.json"

    @contextmanager
    def _writing(self) -> Iterator[None]:
        def kept() -> str:
            return f"{self.stored.num_rows} rows are kept" if self._open else "what was there is as it was"

        try:
            with writing(self.schema.name, self.table.folder, kept, lambda: max(self._buffered_bytes, 1)):
                yield
        except DiskError:
            self._failed = True
            raise
