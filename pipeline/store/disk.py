"""Files that are there whole or not at all, also after a power cut, and the disk's complaints in one line."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]  # where make runs
TEMPORARY = ".tmp-"  # begins the name of every file that is not whole yet


class DiskError(ValueError):
    """The disk refused, in one line."""


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def from_home(path: str | Path) -> Path:
    """A path in which ~ may stand for a home folder; of a user whom nobody knows, as it is."""
    with suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk itself."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync alone stops at the drive's own cache
            with suppress(OSError):  # some network file systems refuse it
                fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
                return
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Create a folder and those above it, each one's name on the disk before the next."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, with its suffix. It becomes `path` when the block ends well and vanishes otherwise."""
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


def sweep(folder: Path) -> None:
    """Delete what writers that were killed left half written. Only the holder of the lock may."""
    for path in folder.rglob(f"{TEMPORARY}*"):
        path.unlink(missing_ok=True)


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; files that vanish meanwhile count nothing."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def readable_size(size: int) -> str:
    """A number of bytes in words, rounded up, never 0 MB."""
    return f"{-(-size // 2**20)} MB" if size < 2**30 else f"{size / 2**30:.1f} GB"


def first_line(error: BaseException) -> str:
    """What an error says, without what follows its first line."""
    return str(error).partition("\n")[0]


def error_number(error: BaseException) -> int | None:
    """The system's number of an error; Lance puts it in the text ("os error 28") of errors of many types."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"(?:os error|errno) (\d+)", str(error), re.IGNORECASE)
    return int(found[1]) if found else None


@contextmanager
def writing(table: str, folder: Path, kept: Callable[[], str], need: Callable[[], int]) -> Iterator[None]:
    """Turn what the disk refuses into one line: what was written, what is safe, what would help."""
    try:
        yield
    except Exception as error:
        number = error_number(error)
        if number is None or number == errno.ENOENT:
            raise
        safe = kept()
        if number in _FULL:
            line = f"disk full while writing {table}: {safe}; free {readable_size(need())} or more and run again"
        else:
            line = f"cannot write {table} in {folder}: {os.strerror(number).lower()}; {safe}"
        raise DiskError(line) from error
