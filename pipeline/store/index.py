"""The rows of a table in a Lance dataset, whose versions are on the disk before they count.

Lance itself never calls fsync: after a power cut its newest manifest may be empty. So every commit here is followed by an
fsync of all new files, and a writer begins by going back to the newest version that can be read.
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

LIVE = pa.field("live", pa.bool_(), metadata={"doc": "wanted by the last finished run; null: written since then"})
FORMAT = "2.2"  # the newest format that DuckDB's extension for Lance reads
PINNED = "manifest"  # the Lance tag that protects a version from cleanup


class DamageError(Exception):
    """Raised if a version of the dataset cannot be read because its files are damaged or lost."""


class Index:
    """A Lance dataset that holds the rows of one table, without tensors. `path` is its folder and `schema` its columns. The
    dataset need not exist before the first commit. Each commit makes a new version, and versions are numbered from 1.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.schema = schema
        self._synced: set[tuple[str, int, int]] = set()

    def read(self, version: int) -> pa.Table:
        """Return all rows of one version of the dataset. The columns are those of `schema`. Columns that an earlier
        release stored under other names are renamed. Raises DamageError if files of the version are damaged or lost.
        """
        import lance

        try:
            rows = lance.dataset(self.path, version=version).to_table()
            rows = rows.rename_columns([COLUMNS.get(name, name) for name in rows.column_names])
            return rows.select(self.schema.names).cast(self.schema)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # A panic in Lance's Rust code is a BaseException.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            if not _is_damage(error):
                raise
            raise DamageError(f"{self.path} cannot be read at version {version}: {first_line(error)}") from error

    def read_newest(self) -> pa.Table:
        """Return the rows of the newest version that can be read. The run that wrote it need not have finished. If no version
        can be read, return an empty table.
        """
        for version in sorted(self._manifests(), reverse=True):
            with suppress(DamageError):  # or a writer has just deleted the version
                return self.read(version)
        return self.schema.empty_table()

    def recover(self) -> tuple[int, pa.Table]:
        """Delete all versions that are newer than the newest readable one. Return the number of that version and its rows. If
        no version can be read, delete the dataset and return 0 and an empty table.
        """
        for version, path in sorted(self._manifests().items(), reverse=True):
            try:
                return version, self.read(version)
            except DamageError:
                with path.open("rb"):  # raises where the file may not be opened, which is no damage
                    pass
                path.unlink()
                self._hint().unlink(missing_ok=True)
                sync(path.parent)
        if self.path.exists():
            shutil.rmtree(self.path)
            sync(self.path.parent)
        return 0, self.schema.empty_table()

    def append(self, rows: pa.Table) -> int:
        """Add rows to those of the newest version, in one commit. Return the number of the new version. If writing fails, for
        example on a full disk, the dataset is unchanged.
        """
        return self._commit(rows, "append" if self._manifests() else "create")

    def replace(self, rows: pa.Table) -> int:
        """Replace all rows of the newest version by `rows`, in one commit. Return the number of the new version. If writing
        fails, for example on a full disk, the dataset is unchanged.
        """
        return self._commit(rows, "overwrite" if self._manifests() else "create")

    def prune(self, pinned: int | None) -> None:
        """Delete all versions except the newest one and the version `pinned`. If `pinned` is None, only the newest one is
        kept. Files that belong to no version are deleted too.
        """
        try:
            self._clean(pinned)
        except Exception as error:
            if not _is_damage(error):
                raise
            self._delete_unreadable()  # Lance reads every old manifest and fails at the first damaged one
            self._clean(pinned)
        self._sync()

    def has_old_columns(self) -> bool:
        """Return True if the newest version has column names of an earlier release. Rows cannot be appended to such a version:
        `replace` must rewrite all rows first.
        """
        import lance

        return bool(self._manifests()) and bool(COLUMNS.keys() & set(lance.dataset(self.path).schema.names))

    def data_bytes(self, version: int) -> int:
        """Return the total size in bytes of the data files of one version."""
        return sum(path.stat().st_size for path, _ in self._data(version))

    def _clean(self, pinned: int | None) -> None:
        import lance

        dataset = lance.dataset(self.path)
        with suppress(FileNotFoundError):  # a tag is only needed during this call: the manifest names the version that counts
            shutil.rmtree(self.path / "_refs")
        if pinned is not None and pinned != dataset.version:
            dataset.tags.create(PINNED, pinned)
        dataset.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False)

    def _delete_unreadable(self) -> None:
        for version, path in sorted(self._manifests().items())[:-1]:
            try:
                self.read(version)
            except DamageError:
                path.unlink()

    def _commit(self, rows: pa.Table, mode: str) -> int:
        import lance

        make_folder(self.path.parent)
        before = self._files()
        try:
            rows = rows.cast(self.schema).combine_chunks()
            version = int(lance.write_dataset(rows, self.path, mode=mode, data_storage_version=FORMAT).version)
            for path, size in self._data(version):
                if path.stat().st_size != size:  # on a full disk Lance writes a short file and reports no error
                    raise OSError(errno.ENOSPC, f"{path} has {path.stat().st_size} of {size} bytes")
            self._sync()
        except BaseException:
            for path in self._files() - before:  # the next commit must not build on an incomplete one
                path.unlink()
            self._hint().unlink(missing_ok=True)
            raise
        return version

    def _data(self, version: int) -> Iterator[tuple[Path, int]]:
        """Yield the path of each data file of a version, and the size in bytes that the file should have."""
        import lance

        for fragment in lance.dataset(self.path, version=version).get_fragments():
            for file in fragment.data_files():
                yield self.path / "data" / file.path, file.file_size_bytes

    def _files(self) -> set[Path]:
        return {path for path in self.path.rglob("*") if path.is_file()}

    def _sync(self) -> None:
        """Flush to disk (fsync) all files that are new or changed since the last call, then all folders of the dataset."""
        found = {(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in self._files()}
        for name, _, _ in found - self._synced:
            sync(Path(name))
        for folder in [*(p for p in self.path.iterdir() if p.is_dir()), self.path, self.path.parent]:
            sync(folder)
        self._synced = found

    def _manifests(self) -> dict[int, Path]:
        """Return the manifest file of each version: version number -> path."""
        found = {}
        for path in self.path.glob("_versions/*.manifest"):
            if path.stem.isdigit():
                number = int(path.stem)  # in 20 digits Lance counts down from 2^64 - 1: the newest sorts first
                found[2**64 - 1 - number if len(path.stem) == 20 else number] = path
        return found

    def _hint(self) -> Path:
        return self.path / "_versions" / "latest_version_hint.json"


def _is_damage(error: BaseException) -> bool:
    """Return True if an error of Lance means that files of the table are lost or unreadable. Return False if the system
    refused access to them.
    """
    return error_number(error) in (None, errno.ENOENT)
