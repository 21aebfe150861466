"""The rows of a table in a Lance dataset, whose versions are on the disk before they count.

Lance never calls fsync, and has no checksums. So every commit here is followed by an fsync of all new files, each file gets
a checksum, and a writer begins by going back to the newest version that can be read.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.checksums import Checksums
from pipeline.store.disk import delete, error_number, make_folder, stamp, sync
from schemas.table import Among

if TYPE_CHECKING:
    import lance

LIVE = pa.field("live", pa.bool_(), metadata={"doc": "wanted by the last finished run; null: written since then"})
FORMAT = "2.2"  # the newest format that DuckDB's extension for Lance reads
PINNED = "manifest"  # the Lance tag that protects a version from cleanup
CHECKED = ("data/*", "_deletions/*", "_versions/*.manifest")  # files of the dataset that get a checksum
FRAGMENTS = 64  # of a dataset that is revised, at most: each file costs every reader a little
DELETED = 1 / 8  # of its rows, likewise
FEW = 2000  # values that Lance is asked for, at most
# Errors that are no damage: too little memory, mistakes of the program.
UNRELATED = (MemoryError, ImportError, TypeError, AttributeError, NameError, AssertionError, NotImplementedError)
RUST = re.compile(r",? /\S+\.rs:\d+:\d+")  # where in its code Lance met an error
KEPT = 128, 64 << 10  # reads that a process keeps, and bytes of each at most: commands read a version several times
_kept: dict[tuple[str, int, tuple[str, ...]], tuple[dict[Path, tuple[int, int, int]], pa.Table]] = {}  # with the files' stamps
_keeping = threading.Lock()
_quiet = threading.Lock()
os.environ.setdefault("LANCE_LOG", "error")  # read when Lance is imported; its warnings tell a user nothing


class DamageError(Exception):
    """A version of the dataset cannot be read because its files are damaged or lost."""


class Index:
    """A Lance dataset with the rows of one table, without tensors. Each commit makes a version; they count from 1."""

    def __init__(self, path: Path, schema: pa.Schema, published: Callable[[], int | None] = lambda: None) -> None:
        self.path = path
        self.schema = schema
        self.published = published  # the version that the table's manifest names
        self.checksums = Checksums(path.parent)
        self._hint = path / "_versions" / "latest_version_hint.json"  # of Lance
        self._synced: set[tuple[str, tuple[int, int, int]]] = set()

    def read(self, version: int, columns: Sequence[str] = (), among: Among | None = None) -> pa.Table:
        """Rows of one version, with these columns or all, `among` some or all. Raises DamageError; ValueError for other columns
        than the schema.
        """
        wanted = pa.schema([self.schema.field(name) for name in columns or self.schema.names])
        key = str(self.path), version, tuple(columns)
        stamps, kept = _kept.get(key, ({}, None))
        if kept is not None and not among and kept.schema == wanted and _stamps(stamps) == stamps:
            return kept
        with self._damage_errors(f"read at version {version}"):
            dataset, problems = self._open(version)
            for path, problem in problems.items():
                raise DamageError(f"{path.name} {problem}")
            stamps = _stamps(
                [self._manifests().get(version, self.path), self.checksums.file, *(path for path, _ in self._data(dataset))]
            )
            some = [*columns] if columns and {*columns} <= {*dataset.schema.names} else None
            few = among is not None and len(among[1]) <= FEW
            rows = dataset.to_table(columns=some, filter=pc.field(among[0]).isin(among[1]) if among and few else None)
            if among and not few:
                rows = rows.filter(pc.is_in(rows[among[0]], among[1]))
        try:
            rows = rows.select(wanted.names).cast(wanted)
        except (KeyError, ValueError, pa.ArrowException):
            now, then = ({f"{each.name} {each.type}" for each in fields} for fields in (self.schema, rows.schema))
            raise ValueError(
                f"{self.path} has other columns than this program reads ({', '.join(sorted(now ^ then)) or 'nulls'}): another "
                f"version wrote it; move {self.path.parent} away and run the stage again"
            ) from None
        if not among and stamps and rows.nbytes <= KEPT[1]:
            with _keeping:
                _kept.pop(key, None)  # the newest comes last
                _kept[key] = stamps, rows
                while len(_kept) > KEPT[0]:
                    del _kept[next(iter(_kept))]
        return rows

    def damaged(self, version: int) -> dict[Path, str]:
        """Damaged or lost files of a version: path -> what is wrong. Raises DamageError if it cannot be opened."""
        with self._damage_errors(f"read at version {version}"):
            return self._open(version, fresh=True)[1]

    def versions(self) -> list[int]:
        return [version for version, path in sorted(self._manifests().items()) if self._is_committed(version, path)]

    def _open(self, version: int, fresh: bool = False) -> tuple[lance.LanceDataset, dict[Path, str]]:
        """A version, and which of its files are damaged. With a damaged manifest it is not opened at all."""
        import lance

        manifest = self._manifests().get(version)
        if manifest and (problem := self.checksums.damage(self._name(manifest), fresh=fresh)):
            return None, {manifest: problem}
        dataset = lance.dataset(self.path, version=version)
        problems = {path: self.checksums.damage(self._name(path), fresh=fresh) for path, _ in self._data(dataset)}
        return dataset, {path: problem for path, problem in problems.items() if problem}

    def _is_committed(self, version: int, path: Path) -> bool:
        # A commit records its checksums last. A version with readers was committed, also if its line in checksums.jsonl is lost.
        return self._name(path) in self.checksums.known() or version == self.published()

    @contextmanager
    def _damage_errors(self, what: str) -> Iterator[None]:
        try:
            with _without_panics():
                yield
        except BaseException as error:
            # A panic in Lance's Rust code is a BaseException. Refused access (an errno other than ENOENT) is no damage.
            known = isinstance(error, Exception) or type(error).__name__ == "PanicException"
            if not known or isinstance(error, UNRELATED) or error_number(error) not in (None, errno.ENOENT):
                raise
            raise DamageError(f"{self.path} cannot be {what}: {RUST.sub('', str(error).partition(chr(10))[0])}") from error

    def _name(self, path: Path) -> str:
        return path.relative_to(self.path.parent).as_posix()

    def read_newest(self, columns: Sequence[str] = ()) -> pa.Table:
        """Rows of the newest version that can be read, of an unfinished run too; none if there is no such version."""
        for version in reversed(self.versions()):
            with suppress(DamageError):  # or a writer has just deleted the version
                return self.read(version, columns)
        none = self.schema.empty_table()
        return none.select(list(columns)) if columns else none

    def recover(self, columns: Sequence[str] = ()) -> tuple[int, pa.Table]:
        """(version, rows) of the newest complete and readable version; newer ones are deleted. (0, no rows) if there is none."""
        # Lance waits for a named pipe, and warns of a folder at every commit.
        if self._hint.exists() and not self._hint.is_file():
            delete(self._hint)
        for version, path in sorted(self._manifests().items(), reverse=True):
            if self._is_committed(version, path):
                try:
                    return version, self.read(version, columns)
                except DamageError:
                    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))  # raises where it may not be: no damage
            # A power cut can leave an empty manifest. Without it and the hint, Lance opens the version before.
            delete(path)
            self.checksums.forget([self._name(path)])  # another version may get the number
            self._hint.unlink(missing_ok=True)
            sync(path.parent)
        if self.path.exists():
            shutil.rmtree(self.path)
            sync(self.path.parent)
        self.checksums.forget(name for name in self.checksums.known() if name.startswith(f"{self.path.name}/"))
        none = self.schema.empty_table()
        return 0, none.select(list(columns)) if columns else none

    def append(self, rows: pa.Table) -> int:
        """One commit; returns its version. If writing fails, as on a full disk, the dataset is unchanged."""
        return self._commit(lambda: self._write(rows, "append" if self._manifests() else "create"))

    def replace(self, rows: pa.Table) -> int:
        return self._commit(lambda: self._write(rows, "overwrite" if self._manifests() else "create"))

    def revise(self, gone: Sequence[int]) -> int | None:
        """Without writing the others again, delete the rows at the positions `gone` and mark those written since the last
        finished run as live: one commit, new rows last. None, and nothing is done, if it is time to `replace` all.
        """
        import lance

        dataset: Any = lance.dataset(self.path)
        fragments = dataset.get_fragments()
        deleted = len(gone) + sum(each.physical_rows - each.count_rows() for each in fragments)
        if len(fragments) >= FRAGMENTS or deleted > DELETED * sum(each.physical_rows for each in fragments):
            return None

        def write() -> lance.LanceDataset:
            # Without a checksum until both are done, the version of the first does not count.
            if gone:
                ids = dataset.to_table(columns=[], with_row_id=True)["_rowid"].take(pa.array(gone)).to_pylist()
                dataset.delete(f"_rowid in ({', '.join(map(str, ids))})")
            dataset.update({LIVE.name: "true"}, where=f"{LIVE.name} is null")
            return dataset

        return self._commit(write)

    def _write(self, rows: pa.Table, mode: str) -> lance.LanceDataset:
        import lance

        rows = rows.cast(self.schema).combine_chunks()
        return lance.write_dataset(rows, self.path, mode=mode, data_storage_version=FORMAT)

    def prune(self, pinned: int | None) -> None:
        """Delete all versions but the newest and `pinned`, and files that belong to none."""
        try:
            with self._damage_errors("cleaned"):
                self._clean(pinned)
        except DamageError:
            # Lance reads every old manifest and fails at the first damaged one.
            for version, path in sorted(self._manifests().items())[:-1]:
                try:
                    self.read(version)
                except DamageError:
                    path.unlink()
                    self.checksums.forget([self._name(path)])
            self._clean(pinned)
        self._sync()
        self.checksums.compact()

    def data_bytes(self, version: int) -> int:
        import lance

        return sum(path.stat().st_size for path, _ in self._data(lance.dataset(self.path, version=version)))

    def _clean(self, pinned: int | None) -> None:
        import lance

        dataset = lance.dataset(self.path)
        with suppress(FileNotFoundError):  # a tag is only needed during this call: the manifest names the version that counts
            shutil.rmtree(self.path / "_refs")
        if pinned is not None and pinned != dataset.version:
            dataset.tags.create(PINNED, pinned)
        # Kills leave data files of no version, which only delete_unverified removes.
        dataset.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False)

    def _commit(self, write: Callable[[], lance.LanceDataset]) -> int:
        make_folder(self.path.parent)
        before = self._files()
        try:
            dataset = write()
            for path, size in self._data(dataset):
                if path not in before and path.stat().st_size < size:  # a full disk: Lance reports no error
                    raise OSError(errno.ENOSPC, f"{path} has {path.stat().st_size} of {size} bytes")
            # Without it, all of 15 simulated power cuts lost committed rows; with it none, once `recover` had deleted the
            # manifest of an unfinished commit (5 of 15).
            self._sync()
            new = {path for pattern in CHECKED for path in self.path.glob(pattern)} - before
            self.checksums.record({self._name(path): path for path in new})
        except BaseException:
            for path in self._files() - before:  # the next commit must not build on an incomplete one
                path.unlink()
            self._hint.unlink(missing_ok=True)
            raise
        return int(dataset.version)

    def _data(self, dataset: lance.LanceDataset) -> Iterator[tuple[Path, int]]:
        """The files of a version, and how many bytes each must have at least."""
        for fragment in dataset.get_fragments():
            for file in fragment.data_files():
                yield self.path / "data" / file.path, file.file_size_bytes
            if deletions := fragment.deletion_file():
                yield self.path / deletions, 1

    def _files(self) -> set[Path]:
        return {path for path in self.path.rglob("*") if path.is_file()}

    def _sync(self) -> None:
        found = {(str(path), stamp(path)) for path in self._files()}
        for name, _ in found - self._synced:
            sync(Path(name))
        for folder in [*(p for p in self.path.iterdir() if p.is_dir()), self.path, self.path.parent]:
            sync(folder)
        self._synced = found

    def _manifests(self) -> dict[int, Path]:
        found = {}
        for path in self.path.glob("_versions/*.manifest"):
            if path.stem.isdigit():
                number = int(path.stem)  # in 20 digits Lance counts down from 2^64 - 1: the newest sorts first
                found[2**64 - 1 - number if len(path.stem) == 20 else number] = path
        return found


def _stamps(paths: Iterable[Path]) -> dict[Path, tuple[int, int, int]]:
    """Of these files; none if one of them is not there."""
    try:
        return {path: stamp(path) for path in paths}
    except OSError:
        return {}


@contextmanager
def _without_panics() -> Iterator[None]:
    """Hold back standard error, where Lance's Rust code reports a panic: discarded if the block raises, else printed after it."""
    # One thread at a time: descriptor 2 belongs to the whole process.
    with _quiet, tempfile.TemporaryFile() as caught:
        screen = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        except BaseException:
            caught.truncate(0)
            raise
        finally:
            os.dup2(screen, 2)
            os.close(screen)
            caught.seek(0)
            if text := caught.read():
                os.write(2, text)
