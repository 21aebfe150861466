"""Atomic file writes that survive a power cut, and disk errors as one line."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]  # the repository's folder, where `make` runs
TEMPORARY = ".tmp-"  # prefix of the names of files that are still being written


class DiskError(ValueError):
    """The disk refuses to write, for example because it is full. The message is one line for the user."""


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def from_home(path: str | Path) -> Path:
    with suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def common_folder(paths: str | tuple[str, ...], project: Path) -> Path:
    """A single path itself, or the deepest folder that contains several; only then are links resolved."""
    given = [project / from_home(path) for path in ((paths,) if isinstance(paths, str) else paths)]
    return given[0] if len(given) == 1 else Path(os.path.commonpath([path.resolve() for path in given]))


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if hasattr(fcntl, "F_FULLFSYNC"):  # on macOS, fsync alone leaves the bytes in the drive's cache
            with suppress(OSError):  # some network file systems refuse it
                fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
                return
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Each parent is synced, so that a power cut cannot lose the folder."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path, synced and renamed to `path` after the block. Raises OSError if `path` is a folder with files."""
    make_folder(path.parent)
    with _held_folder(path) as folder:
        try:
            yield folder / path.name
            assert (folder / path.name).exists(), f"nothing was written for {path.name}"
            # Without it, all of 10 simulated power cuts lost rows, and 4 left an unreadable file; with it, none of 15.
            _sync_all(folder / path.name)
            (folder / path.name).replace(path)
            delete(folder)
            sync(path.parent)
        finally:
            delete(folder)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """As `atomic_write`, for a folder: the block writes files into the temporary one."""
    make_folder(path.parent)
    with _held_folder(path) as temporary:
        try:
            yield temporary
            _sync_all(temporary)
            temporary.rename(path)
            sync(path.parent)
        finally:
            delete(temporary)


@contextmanager
def _held_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, locked until the block ends. The block must rename or delete it."""
    while True:
        temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}-{path.name}")
        temporary.mkdir()
        # The system releases the lock when the process ends: so `abandoned` recognises the folder of a killed process.
        handle = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if temporary.exists():  # or another process deleted it before it was locked
            break
        os.close(handle)
    try:
        yield temporary
    finally:
        os.close(handle)


def abandoned(folder: Path) -> Iterator[Path]:
    """Temporary files and folders that killed processes left directly in `folder`."""
    for path in sorted(folder.glob(f"{TEMPORARY}*")):
        if path.is_symlink():
            yield path
            continue
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path
            finally:
                os.close(handle)


def delete_abandoned(folder: Path) -> int:
    freed = 0
    for path in abandoned(folder):
        freed += size_of(path)
        delete(path)
    return freed


def _sync_all(path: Path) -> None:
    for each in [*path.rglob("*"), path]:
        sync(each)


def delete_temporary_files(folder: Path) -> None:
    """The caller must hold the folder's lock: the temporary files of a running writer would be deleted too."""
    for path in list(folder.rglob(f"{TEMPORARY}*")):
        delete(path)


def delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder, or of a file. Links are not followed."""
    total = 0
    for path in (folder, *folder.rglob("*")):
        # A file may be deleted meanwhile.
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    return total


def format_bytes(count: float) -> str:
    """Decimal units, such as "812 B", "1.2 MB" or "7.75 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:  # 999.6 MB is rounded to 1 GB
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def error_number(error: BaseException) -> int | None:
    """The errno of an exception, also from the message of an error of Lance or MLX; None if it has none."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    # MLX gives no number.
    if isinstance(error, RuntimeError) and "[write] Unable to write" in str(error):
        return errno.ENOSPC
    found = re.search(r"(?:os error|errno) (\d+)", str(error), re.IGNORECASE)
    return int(found[1]) if found else None


@contextmanager
def explain_disk_errors(table: str, folder: Path, saved: Callable[[], str], needed: Callable[[], int]) -> Iterator[None]:
    """Turn an exception with an errno other than ENOENT into a DiskError. `saved()`: what is safe; `needed()`: bytes to free."""
    try:
        yield
    except Exception as error:
        number = error_number(error)
        if number is None or number == errno.ENOENT:
            raise
        safe = saved()
        if number in _FULL:
            line = f"disk full while writing {table}: {safe}; free {format_bytes(max(needed(), 10**6))} or more and run again"
        else:
            line = f"cannot write {table} in {folder}: {os.strerror(number).lower()}; {safe}"
        raise DiskError(line) from error


def shell_path(folder: Path) -> str:
    """Quoted, for `make PROJECT=` in the checkout: relative only if that leads to the same folder from there."""
    usable = folder.is_absolute() or (CHECKOUT / folder).resolve() == folder.resolve()
    return shlex.quote(str(folder if usable else folder.resolve()))
