"""The rows of a table in Lance: versions that stand or do not, on the disk before anyone counts on them.

Lance itself asks the disk for nothing: after a power cut its newest manifest may be empty. So every commit is followed by
an fsync of what is new, and a writer begins by stepping back to the newest version that can be read.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pyarrow as pa

from pipeline.store.disk import error_number, first_line, make_folder, sync
from schemas.renames import COLUMNS

LIVE = pa.field("live", pa.bool_(), metadata={"doc": "wanted by the last run that finished; null: written since"})
FORMAT = "2.2"  # the newest that DuckDB's extension for Lance reads
PINNED = "manifest"  # the tag that keeps a version from being cleaned away
_GONE = 2  # "no such file": part of the table is lost, which is damage; other system errors are not


class Damaged(Exception):  # noqa: N818  (says what the table is)
    """A version of the table, or all of it, cannot be read."""


class Index:
    """One Lance dataset of small rows."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.schema = schema
        self._synced: set[tuple[str, int, int]] = set()

    def read(self, version: int) -> pa.Table:
        """All rows of one version. Damaged if they cannot be read."""
        import lance

        try:
            rows = lance.dataset(self.path, version=version).to_table()
            rows = rows.rename_columns([COLUMNS.get(name, name) for name in rows.column_names])
            return rows.select(self.schema.names).cast(self.schema)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Lance's Rust gives up so
                raise
            if error_number(error) not in (None, _GONE):
                raise
            raise Damaged(f"{self.path} cannot be read at version {version}: {first_line(error)}") from error

    def newest(self) -> pa.Table:
        """The rows of the newest version that can be read, whoever wrote it; none if there is no such. Nothing is changed."""
        for version in sorted(self._manifests(), reverse=True):
            with suppress(Damaged):  # or cleaned away just now
                return self.read(version)
        return self.schema.empty_table()

    def recover(self) -> tuple[int, pa.Table]:
        """The newest version that can be read, and its rows; 0 and none if there is no such. What is newer is deleted."""
        for version, path in sorted(self._manifests().items(), reverse=True):
            try:
                return version, self.read(version)
            except Damaged:
                with path.open("rb"):  # what we may not open is not damaged
                    pass
                path.unlink()
                self._hint().unlink(missing_ok=True)
                sync(path.parent)
        if self.path.exists():
            shutil.rmtree(self.path)
            sync(self.path.parent)
        return 0, self.schema.empty_table()

    def append(self, rows: pa.Table) -> int:
        """Add rows, in one commit; returns its version."""
        return self._commit(rows, "append" if self._manifests() else "create")

    def replace(self, rows: pa.Table) -> int:
        """Make these all the rows there are, in one commit; returns its version."""
        return self._commit(rows, "overwrite" if self._manifests() else "create")

    def prune(self, pinned: int | None) -> None:
        """Delete every version but the newest and the pinned one, and files that no version names."""
        try:
            self._clean(pinned)
        except Exception as error:
            if error_number(error) not in (None, _GONE):
                raise
            self._drop_unreadable()  # Lance reads every old manifest and stops at the first that is damaged
            self._clean(pinned)
        self._sync()

    def has_old_columns(self) -> bool:
        """Whether the newest version was written with column names of an earlier release, so that nothing can be appended."""
        import lance

        return bool(self._manifests()) and bool(COLUMNS.keys() & set(lance.dataset(self.path).schema.names))

    def data_bytes(self, version: int) -> int:
        """Bytes of the data files of one version."""
        return sum(path.stat().st_size for path, _ in self._data(version))

    def _clean(self, pinned: int | None) -> None:
        import lance

        dataset = lance.dataset(self.path)
        with suppress(FileNotFoundError):  # a tag lives for the length of this call; which version counts, the manifest says
            shutil.rmtree(self.path / "_refs")
        if pinned is not None and pinned != dataset.version:
            dataset.tags.create(PINNED, pinned)
        dataset.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False)

    def _drop_unreadable(self) -> None:
        for version, path in sorted(self._manifests().items())[:-1]:
            try:
                self.read(version)
            except Damaged:
                path.unlink()

    def _commit(self, rows: pa.Table, mode: str) -> int:
        import lance

        make_folder(self.path.parent)
        before = self._files()
        try:
            rows = rows.cast(self.schema).combine_chunks()
            version = int(lance.write_dataset(rows, self.path, mode=mode, data_storage_version=FORMAT).version)
            for path, size in self._data(version):
                if path.stat().st_size != size:  # on a full disk Lance writes short and says nothing
                    raise OSError(errno.ENOSPC, f"{path} has {path.stat().st_size} of {size} bytes")
            self._sync()
        except BaseException:
            for path in self._files() - before:  # or the next commit would stand on what is not whole
                path.unlink()
            self._hint().unlink(missing_ok=True)
            raise
        return version

    def _data(self, version: int) -> Iterator[tuple[Path, int]]:
        """The data files of a version and the sizes they should have."""
        import lance

        for fragment in lance.dataset(self.path, version=version).get_fragments():
            for file in fragment.data_files():
                yield self.path / "data" / file.path, file.file_size_bytes

    def _files(self) -> set[Path]:
        return {path for path in self.path.rglob("*") if path.is_file()}

    def _sync(self) -> None:
        """Put on the disk what is new below the folder, then the folders' names."""
        found = {(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in self._files()}
        for name, _, _ in found - self._synced:
            sync(Path(name))
        for folder in [*(p for p in self.path.iterdir() if p.is_dir()), self.path, self.path.parent]:
            sync(folder)
        self._synced = found

    def _manifests(self) -> dict[int, Path]:
        """Versions and their manifests. Lance counts names down from 2^64 - 1, so that the newest is listed first."""
        found = {}
        for path in self.path.glob("_versions/*.manifest"):
            if path.stem.isdigit():
                number = int(path.stem)
                found[2**64 - 1 - number if len(path.stem) == 20 else number] = path
        return found

    def _hint(self) -> Path:
        return self.path / "_versions" / "latest_version_hint.json"
