"""Atomic file writes that survive a power cut, and disk errors as one line."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]  # the repository's folder, where `make` runs
TEMPORARY = ".tmp-"  # prefix of the names of files that are still being written


class DiskError(ValueError):
    """The disk refused to write. The message is one line for the user."""


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def from_home(path: str | Path) -> Path:
    """Expand a leading ~ in a path. The path is returned unchanged if it names an unknown user."""
    with suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk (fsync; F_FULLFSYNC on macOS)."""
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
    """Create a folder and its missing parents, and sync each parent, so that a power cut cannot lose the folder."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path with the suffix of `path`, in the same folder. The block must write a file there.

    When the block ends, the temporary file is synced and renamed to `path`. If the block raises, the temporary file is
    deleted and `path` keeps its old content. Missing parent folders are created.
    """
    make_folder(path.parent)
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}-{path.name}")
    try:
        yield temporary
        assert temporary.is_file(), f"nothing was written for {path.name}"
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`. The block must write files there.

    When the block ends, the files are synced and the folder is renamed to `path`, which must not exist or be empty: OSError
    otherwise. If the block raises, the temporary folder is deleted. Missing parent folders are created.
    """
    make_folder(path.parent)
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}-{path.name}")
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            sync(file)
        sync(temporary)
        temporary.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def delete_temporary_files(folder: Path) -> None:
    """Delete all temporary files below a folder, which killed writers left there. The caller must hold the folder's lock."""
    for path in folder.rglob(f"{TEMPORARY}*"):
        path.unlink(missing_ok=True)


def size_of(folder: Path) -> int:
    """Total size in bytes of all files below a folder. Links are not followed; files deleted meanwhile count as 0."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    return total


def readable_size(size: int) -> str:
    """Format a number of bytes as whole MB, rounded up ("1 MB" for 5 bytes), or as GB with one decimal from 1 GiB on."""
    return f"{-(-size // 2**20)} MB" if size < 2**30 else f"{size / 2**30:.1f} GB"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message."""
    return str(error).partition("\n")[0]


def error_number(error: BaseException) -> int | None:
    """The errno of an exception, or None. Exceptions of Lance, which are not OSErrors, name it in their text ("os error 28")."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"(?:os error|errno) (\d+)", str(error), re.IGNORECASE)
    return int(found[1]) if found else None


@contextmanager
def explain_disk_errors(table: str, folder: Path, saved: Callable[[], str], needed: Callable[[], int]) -> Iterator[None]:
    """Turn system errors raised in the block into a DiskError of one line; other exceptions pass unchanged.

    `table` and `folder` are named in the message. `saved()` says what is safe ("120 rows are kept"), and `needed()` is the
    number of bytes to free if the disk is full.
    """
    try:
        yield
    except Exception as error:
        number = error_number(error)
        if number is None or number == errno.ENOENT:
            raise
        safe = saved()
        if number in _FULL:
            line = f"disk full while writing {table}: {safe}; free {readable_size(needed())} or more and run again"
        else:
            line = f"cannot write {table} in {folder}: {os.strerror(number).lower()}; {safe}"
        raise DiskError(line) from error
