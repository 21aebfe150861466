"""A table on disk: `TableFolder` as readers see it, `Writer` the one process that changes it.

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
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.checksums import sealed, unsealed
from pipeline.store.disk import (
    FULL,
    LEAST,
    TEMPORARY,
    DiskError,
    atomic_write,
    delete,
    delete_abandoned,
    explain_disk_errors,
    format_bytes,
    make_folder,
    refuse_links,
    size_of,
    stamp,
    sync,
)
from pipeline.store.index import LIVE, DamageError, Index
from pipeline.store.lock import locked
from pipeline.store.repair import Damage, examine_shards, reclaimable_bytes, reconcile, repack
from pipeline.store.rows import conform, matches, newest_per_key, newest_positions, taken
from pipeline.store.shards import SHARD_BYTES, ShardReader, damaged_shards, rows_per_shard, shard_files, write_shard
from schemas.table import Among, TableSchema

FLUSH_SECONDS = 30.0  # as long as rows arrive, they are committed at least this often; a kill loses no more work
# 1,000 commits of 32 rows: 44 MB for 0.7 MB of rows, and a commit takes 4 to 7 ms instead of 1.5.
LANCE = ".lance"  # suffix of a folder with a data set of Lance
REVISED = 1 / 32  # of the rows of a table with long columns: if a run changes no more, the others are not written again
COMMITS = 64  # after this many commits the index is rewritten in one: Lance's manifests grow with every commit


class TableFolder:
    """The table of one stage and recipe, opened for reading. `folder` need not exist yet."""

    def __init__(self, folder: Path, schema: TableSchema) -> None:
        self.folder = folder
        self.schema = schema
        self.manifest_file = folder / "manifest.json"
        self.shards = folder / "shards"
        self.index = Index(folder / "rows.lance", schema.stored.append(LIVE), self.published_version)
        self.checksums = self.index.checksums
        self._manifest: tuple[tuple[int, int, int], dict[str, Any]] | None = None  # its file's stamp, its content

    @property
    def exists(self) -> bool:
        try:
            self.manifest()
        except ValueError:
            return False
        return True

    def published_version(self) -> int | None:
        return int(self.manifest()["lance_version"]) if self.exists else None

    def manifest(self) -> dict[str, Any]:
        """Of the last finished run; read again only if the file has changed. Raises ValueError if it is missing or damaged."""
        path = self.manifest_file
        try:
            now = stamp(path)
            if self._manifest is None or self._manifest[0] != now:
                self._manifest = now, unsealed(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"there is no table {self.schema.name} yet: {path} is missing; run the stage first") from None
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); run the stage again") from None
        return self._manifest[1]

    def rows(self, version: int | None = None, columns: Sequence[str] = (), among: Among | None = None) -> pa.Table:
        """Rows that readers see, without those whose shard or artifact is missing or has another size; with these columns or all,
        `among` some or all. In the order of the key; of a table with long columns, those of the last runs come last.

        Raises ValueError if no run has finished or its rows are damaged, DamageError if a given Lance `version` cannot be read.
        """
        wanted = self.read_for(columns)
        if among:
            wanted = wanted and [*dict.fromkeys((*wanted, among[0]))]
        found = self._rows(version, [*wanted, LIVE.name] if wanted else [], among)
        return found.select(list(columns)) if columns else found

    def read_for(self, columns: Sequence[str]) -> list[str]:
        """Which columns must be read for `columns`; none: all, as whether a file is there is known from other columns."""
        return [] if self.schema.tensors or self.schema.artifact else [*columns]

    def _rows(self, version: int | None, columns: Sequence[str], among: Among | None = None) -> pa.Table:
        if version is not None:
            return self._live_rows(self.index.read(version, columns, among))
        manifest = self.manifest()
        try:
            rows = self.index.read(manifest["lance_version"], columns, among)
        except DamageError as error:
            if self.manifest() != manifest:  # a run has just finished and deleted this version
                return self._rows(None, columns, among)
            raise ValueError(f"{error}; run the stage again") from error
        return self._live_rows(rows)

    def _live_rows(self, rows: pa.Table) -> pa.Table:
        live = pc.fill_null(rows["live"], False)
        rows = rows if pc.all(live).as_py() else rows.filter(live)  # a filter copies all
        kept = pa.schema([field for field in self.schema.stored if field.name in rows.column_names])
        return self.with_files(rows.select(kept.names).cast(kept))

    def with_files(self, rows: pa.Table, *, read: bool = False) -> pa.Table:
        """Those of `rows` whose shard and artifact have the right size. `read`: artifacts must also fit their checksums."""
        if self.schema.tensors and (damaged := damaged_shards(rows, self.shards, self.schema)):
            rows = rows.filter(pc.invert(pc.is_in(rows["shard"], pa.array(sorted(damaged), pa.string()))))
        if not self.schema.artifact:
            return rows
        check = self.checksums.damage if read else self.checksums.resized
        whole = [not check(f"artifacts/{name}") for name in rows[self.schema.artifact].to_pylist()]
        return rows if all(whole) else rows.filter(pa.array(whole, pa.bool_()))

    def committed(self, columns: Sequence[str] = ()) -> pa.Table:
        """The newest stored row of each key, these columns or all. `live` is null if the last finished run had no such row."""
        wanted = self.read_for(columns)
        rows = self.index.read_newest([*dict.fromkeys((*wanted, *self.schema.key))] if wanted else [])
        found = self.with_files(newest_per_key(rows, self.schema.key))
        return found.select(list(columns)) if columns else found

    def reclaimable_bytes(self) -> int:
        """Estimate of what `Writer.collect` frees: unused parts of sparse shards, and artifacts that no row names."""
        rows = self.with_files(self.index.read_newest())
        if not self.exists:
            return 0
        kept = rows.filter(pc.fill_null(rows["live"], True))
        unnamed = sum(map(size_of, self.unnamed_files(kept, rows)))
        return unnamed + (reclaimable_bytes(kept, self.shards, self.schema) if self.schema.tensors else 0)

    def unnamed_files(self, rows: pa.Table, all_rows: pa.Table) -> list[Path]:
        if not self.schema.artifact:
            return []
        root = self.folder / "artifacts"
        # Only folders with files of rows: those of checkpoints, and artifacts/ itself, hold files that no row names.
        folders = {(root / name).parent for name in all_rows[self.schema.artifact].to_pylist()} - {root}
        named = {root / name for name in rows[self.schema.artifact].to_pylist()}
        return sorted(path for folder in folders for path in folder.glob("[!.]*") if path not in named)

    def tensors(self, version: int | None = None) -> ShardReader:
        """Raises ValueError if a shard is missing or too short."""
        assert self.schema.tensors, f"{self.schema.name} has no tensors"
        return ShardReader(self.folder, self.rows(version), self.schema)

    def whole_folders(self) -> list[str]:
        """The artifacts that are folders and were written whole: data sets of Lance."""
        found = (self.folder / "artifacts").glob(f"*{LANCE}")
        return sorted(path.relative_to(self.folder).as_posix() for path in found if path.is_dir() and not path.is_symlink())

    def require_intact(self, artifact: str) -> None:
        """Raises ValueError if a file of this artifact, a folder, is missing or differs from its checksum."""
        name = f"artifacts/{artifact}"
        for each in self.checksums.below(name) if (self.folder / name).is_dir() else ():
            if problem := self.checksums.damage(each):
                raise ValueError(f"{self.folder / each} {problem}: run latentmill verify --repair")

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

    def examine(self) -> Iterator[Damage]:
        """Compares all files of the table with their checksums; nothing is written."""
        if not self.folder.is_dir():
            return
        try:
            self.manifest()
        except ValueError as error:
            if self.manifest_file.exists():
                yield Damage("manifest.json", str(error).partition(" is ")[2].partition(";")[0] or "is damaged")
        # The version that readers use, and the newest.
        for version in sorted({max(self.index.versions(), default=0), self.published_version() or 0} - {0}):
            try:
                for path, problem in self.index.damaged(version).items():
                    yield Damage(path.relative_to(self.folder).as_posix(), problem)
            except DamageError as error:
                yield Damage(self.index.path.name, f"cannot be read: {error}")
        rows = self.index.read_newest()
        if self.schema.tensors:
            yield from examine_shards(rows, self.checksums, self.schema)
        named: dict[str, list[str]] = {}
        if self.schema.artifact:
            for row in rows.to_pylist():
                key = " ".join(str(row[name])[:16] for name in self.schema.key)
                named.setdefault(f"artifacts/{row[self.schema.artifact]}", []).append(key)
        there = {path.relative_to(self.folder).as_posix() for path in (self.folder / "artifacts").rglob("*") if path.is_file()}
        folders = self.whole_folders()
        recorded = {name for folder in folders for name in self.checksums.below(folder)}
        # Of data sets that were written one after another, one is there.
        if not folders and (
            gone := [name for name in self.checksums.known() if name.startswith("artifacts/") and f"{LANCE}/" in name]
        ):
            yield Damage(gone[-1].partition(f"{LANCE}/")[0] + LANCE, "is missing")
        # A file that only a row or a checksum names is missing.
        for name in sorted(there | named.keys() | recorded):
            if problem := self.checksums.damage(name, fresh=True):
                yield Damage(name, problem, tuple(named.get(name, ())))


class Writer:
    """The only writer of one table: a second is a ValueError. Repairs what killed writers left; commits by size and by time."""

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
        self._handle = -1  # of the lock file, while it is open
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_bytes = 0
        self._buffered_since = 0.0
        self._columns = () if table.schema.short == tuple(table.schema.stored.names) else (*table.schema.short, LIVE.name)
        # All rows of the index, older before newer, without long columns.
        self._rows = table.index.schema.empty_table().select([*self._columns] or table.index.schema.names)
        self._stored: tuple[pa.Table, pa.Table] | None = None  # `stored` of which `_rows`
        self._newest: tuple[pa.Table, np.ndarray] | None = None  # `newest` of which `_rows`
        self.version = 0  # of the index; 0 if there is none
        self._commits = 0  # since the index was last rewritten
        self._written_keys = [self._rows.select(self.schema.key)]  # of every row committed by this writer
        self._finished_bytes = 0  # of the table's folder when the run ends, as far as it is known
        self._open = False
        self._failed = False

    def __enter__(self) -> Writer:
        with ExitStack() as lock, self._disk_errors():
            refuse_links(self.table.folder)
            make_folder(self.table.folder)
            self._handle = lock.enter_context(locked(self.table.folder / "lock"))
            delete_abandoned(self.table.folder, below=True)
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

    def expect(self, count: int) -> None:
        """The run will write `count` bytes: what a full disk lacks is then known."""
        self._finished_bytes = size_of(self.table.folder) + count

    @property
    def stored(self) -> pa.Table:
        """The newest committed row of each key, without tensors and long columns; of killed runs too, and rows that are no longer
        wanted.
        """
        if self._stored is None or self._stored[0] is not self._rows:
            kept = pa.schema([self.schema.stored.field(name) for name in self.schema.short])
            self._stored = self._rows, taken(self._rows, self.newest).select(kept.names).cast(kept)
        return self._stored[1]

    @property
    def published(self) -> pa.Table:
        """The rows that readers see, without long columns."""
        live = pc.fill_null(self._rows[LIVE.name], False)
        rows = self._rows if pc.all(live).as_py() else self._rows.filter(live)
        return rows.select([name for name in rows.column_names if name != LIVE.name])

    @property
    def newest(self) -> np.ndarray:
        """The positions of the newest rows of each key among all, in order."""
        if self._newest is None or self._newest[0] is not self._rows:
            rows, key = self._rows, self.schema.key
            # Those of finished runs come first, and have different keys.
            old = rows.slice(0, rows.num_rows - rows[LIVE.name].null_count)
            if len(key) > 1 or old[LIVE.name].null_count:
                found = newest_positions(rows, key)
            else:
                new = rows.slice(old.num_rows)
                replaced = pc.is_in(old[key[0]], new[key[0]].combine_chunks()).to_numpy()
                found = np.concatenate([np.flatnonzero(~replaced), old.num_rows + newest_positions(new, key)])
            self._newest = rows, found
        return self._newest[1]

    @property
    def rows_written(self) -> int:
        return int(newest_per_key(pa.concat_tables(self._written_keys), self.schema.key).num_rows)

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
            if temporary.is_dir():  # those of an earlier folder of this name
                self.table.checksums.forget(self.table.checksums.below(own.as_posix()))
            # Before the rename: if a kill comes between, the old file still agrees with its older record.
            self.table.checksums.record({(own / each.relative_to(temporary)).as_posix(): each for each in files})
        return path

    def finish(self, wanted: pa.Table | None, facts: dict[str, Any]) -> dict[str, Any]:
        """Publish rows that equal one of `wanted` in all its columns (None: all), hide or delete others; return the manifest."""
        self.flush()
        rows = taken(self._rows, self.newest)
        live = pa.array([True] * rows.num_rows, pa.bool_()) if wanted is None else matches(rows, wanted, wanted.column_names)
        rows = rows.set_column(rows.schema.get_field_index(LIVE.name), LIVE, live)
        dropped = not self.schema.tensors and not self.schema.retains_dead_rows and not pc.all(live).as_py()
        old = self.table.manifest() if self.table.exists else None
        unchanged = not dropped and self.version == self.table.published_version() and rows["live"].equals(self._rows["live"])
        facts = {**(old or {}).get("facts", {}), **json.loads(json.dumps(facts))}
        if old and unchanged and facts == old["facts"]:
            return old
        with self._disk_errors():
            if not unchanged and not self._revise(self.newest[live.to_numpy(zero_copy_only=False)]):
                order = pc.sort_indices(rows, [(name, "ascending") for name in self.schema.key])
                # At once: a filter and a sort would each copy the texts of all units.
                kept = order.filter(rows["live"].combine_chunks().take(order)) if dropped else order
                rows = self._with_long(rows, self.newest)
                self._replace(taken(rows, kept.to_numpy()))
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
                rows, obsolete = repack(rows, self.table.folder, self.schema, self._shard_bytes)
            if obsolete or rows.num_rows < self._rows.num_rows:
                self._replace(rows)
                self._publish(self.table.manifest()["facts"])
            # After the commit that no longer names them.
            gone = [*obsolete, *self.table.unnamed_files(rows, all_rows)]
            for path in gone:
                path.unlink(missing_ok=True)
            if obsolete:
                sync(self.table.shards)
            self.table.checksums.forget(path.relative_to(self.table.folder).as_posix() for path in gone)
        return max(0, before - size_of(self.table.folder))

    def _commit(self) -> None:
        rows = pa.Table.from_batches(self._buffer)
        count = rows_per_shard(rows, self.schema, self._shard_bytes)
        with self._disk_errors():
            stored = rows.slice(0, count)
            if self.schema.tensors:
                stored = write_shard(self.table.folder, stored, self.schema)
            # Training yields a row at a time; a chunk of one row takes 10 kB.
            stored = stored.combine_chunks().append_column(LIVE, pa.nulls(count, pa.bool_()))
            self.version = self.table.index.append(stored)
            self._rows = pa.concat_tables([self._rows, stored.select(self._rows.column_names)])
            self._written_keys.append(stored.select(self.schema.key))
            self._buffer = rows.slice(count).to_batches()
            self._buffered_bytes = sum(batch.nbytes for batch in self._buffer)
            self._buffered_since = time.monotonic()
            self._commits += 1
            if self._commits >= COMMITS:
                self._written_keys = [pa.concat_tables(self._written_keys).combine_chunks()]
                self._replace(self._with_long(self._rows, np.arange(self._rows.num_rows)))
                self.table.index.prune(self.table.published_version())

    def _replace(self, rows: pa.Table) -> None:
        """`rows`: all columns."""
        rows = rows.combine_chunks()  # once, and not in the index and here
        self.version = self.table.index.replace(rows)
        self._rows = rows.select(self._rows.column_names)
        self._commits = 0

    def _with_long(self, rows: pa.Table, positions: np.ndarray) -> pa.Table:
        """`rows`, which stand at `positions` of the index, with the long columns, too."""
        if not self._columns:
            return rows
        found = taken(self.table.index.read(self.version), positions)
        return found.set_column(found.schema.get_field_index(LIVE.name), LIVE, rows[LIVE.name])

    def _revise(self, kept: np.ndarray) -> bool:
        """Delete the rows of a table with long columns that do not stand at `kept`, and mark the others as live. False, and
        nothing is done, if so many have changed that all are to be written in order.
        """
        rest = np.zeros(self._rows.num_rows, bool)
        rest[kept] = True
        new = pc.is_null(self._rows[LIVE.name]).to_numpy()
        gone = np.flatnonzero(~rest)
        if not self._columns or len(gone) + new.sum() > REVISED * len(rest):
            return False
        version = self.table.index.revise(gone.tolist())
        if version is None:
            return False
        self.version = version
        rows = taken(self._rows, np.concatenate([np.flatnonzero(rest & ~new), np.flatnonzero(rest & new)]))
        live = pa.array([True] * rows.num_rows, pa.bool_())
        self._rows = rows.set_column(rows.schema.get_field_index(LIVE.name), LIVE, live)
        return True

    def _publish(self, facts: dict[str, Any]) -> dict[str, Any]:
        live = self._rows["live"]
        shards = pc.unique(self._rows["shard"]).to_pylist() if self.schema.tensors else []
        size = size_of(self.table.folder / "artifacts") + self.table.index.data_bytes(self.version)
        manifest = {
            "table": self.schema.name,
            "recipe": self.recipe,
            "rows": pc.sum(live, min_count=0).as_py(),
            "dead": pc.sum(pc.invert(live), min_count=0).as_py(),
            "bytes": size + sum((self.table.shards / name).stat().st_size for name in shards),
            "lance_version": self.version,
            "facts": facts,
        }
        with atomic_write(self.table.manifest_file) as temporary:
            temporary.write_text(json.dumps(sealed(manifest), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        # After the manifest: until then readers use the older version.
        self.table.index.prune(None)
        return self.table.manifest()

    def _repair(self) -> None:
        table = self.table
        # Damaged artifacts, so that the stage writes them again. Not in subfolders: those files belong to rows, or to
        # checkpoints, which record digests of their own.
        for path in (table.folder / "artifacts").glob("*"):
            name = f"artifacts/{path.name}"
            # Also a folder in the place of a file.
            if (not path.is_dir() or name in table.checksums.known()) and table.checksums.damage(name):
                self._set_aside(name)
        for folder in table.whole_folders():
            if any(map(table.checksums.damage, table.checksums.below(folder))):
                self._set_aside(folder)
        self.version, rows = table.index.recover(self._columns)
        if table.manifest_file.exists() and not self._has_published_version():
            table.manifest_file.unlink()  # before another version of the index gets the number that it names
            sync(table.folder)
        self._rows = table.with_files(reconcile(rows, table.checksums, self.schema) if self.schema.tensors else rows, read=True)
        if self._rows is not rows:
            self._replace(self._rows)

    def _has_published_version(self) -> bool:
        version = self.table.published_version()
        if version is None or version > self.version:
            return False
        try:
            return version == self.version or bool(self.table.index.read(version).num_columns)
        except DamageError:
            return False

    def _set_aside(self, name: str) -> None:
        target = self.table.folder / "damaged" / name
        make_folder(target.parent)
        delete(target)
        (self.table.folder / name).replace(target)
        self.table.checksums.forget([name, *(each for each in self.table.checksums.known() if each.startswith(f"{name}/"))])

    def remove(self, files: Iterable[str], keys: Collection[str]) -> None:
        """Set `files` aside and remove their rows and those of `keys` (first key column; empty for a table without tensors)."""
        self.flush()
        whole = self.table.whole_folders()
        with self._disk_errors():
            for file in files:
                # One damaged file spoils a folder that was written whole.
                name = next((folder for folder in whole if file.startswith(f"{folder}/")), file)
                if (self.table.folder / name).exists():
                    self._set_aside(name)
            rows = self.table.with_files(self._rows)
            if keys:
                rows = rows.filter(pc.invert(pc.is_in(rows[self.schema.key[0]], pa.array(sorted(keys), pa.string()))))
            if rows.num_rows < self._rows.num_rows:
                self._replace(rows)

    def _in_place(self) -> bool:
        try:
            return os.path.samestat((self.table.folder / "lock").stat(), os.fstat(self._handle))
        except OSError:
            return False

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Raise disk errors as a DiskError with one line. A writer that met one commits nothing more when it is closed."""

        def saved() -> str:
            return f"{self.stored.num_rows} rows are kept" if self._open else "the table is unchanged"

        def needed() -> int:
            return max(self._buffered_bytes, self._finished_bytes - size_of(self.table.folder))

        try:
            if self._open and not self._in_place():  # else a folder of the old name would appear again
                raise DiskError(f"{self.table.folder} was moved or deleted while it was written: run the same command there")
            with explain_disk_errors(self.schema.name, self.table.folder, saved, needed):
                yield
        except DiskError:
            self._failed = True
            raise


def link_table(table: TableFolder) -> None:
    """Point tables/NAME.lance at the rows of `table`; before a run has finished, only delete a link without a target.

    So LanceDB lists every table by its name: `lancedb.connect("PROJECT/tables").open_table("images")` reads that of the last
    run; its column `live` is true for the rows that readers of this program see. Raises DiskError if the disk is full.
    """
    tables, name = table.folder.parents[1], table.folder.parent.name
    link, target = tables / f"{name}.lance", Path(name, table.folder.name, table.index.path.name)
    try:
        if not table.exists:
            if link.is_symlink() and not link.exists():
                link.unlink()
            return
        if link.is_symlink() and link.readlink() == target:
            return
        if link.is_dir() and not link.is_symlink():  # made by a program that copied the project and followed the link
            shutil.rmtree(link)
        temporary = link.with_name(f"{TEMPORARY}{link.name}")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(link)
    except OSError as error:
        if error.errno in FULL:
            line = f"disk full while linking {link}: its rows are kept; free {format_bytes(LEAST)} or more and run again"
            raise DiskError(line) from error
        # Some file systems have no symbolic links.
