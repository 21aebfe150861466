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
    """Raised if the disk refuses to write, for example because it is full. The message is one line for the user."""


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def from_home(path: str | Path) -> Path:
    """Return `path` with a leading `~` or `~USER` replaced by that user's home folder. If the user is unknown, return
    the path unchanged.
    """
    with suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def common_folder(paths: str | tuple[str, ...], project: Path) -> Path:
    """Return one folder for one or several paths. If `paths` is one path, such as "photos" or `("photos",)`, the result
    is this path. If `paths` is a tuple of several paths, the result is the deepest folder that contains all of them.
    For example, `("/data/cats", "/data/dogs")` gives "/data". A relative path starts at the folder `project`. A leading
    `~` is the user's home folder.

    Symbolic links are resolved only if there are several paths.
    """
    given = [project / from_home(path) for path in ((paths,) if isinstance(paths, str) else paths)]
    return given[0] if len(given) == 1 else Path(os.path.commonpath([path.resolve() for path in given]))


def sync(path: Path) -> None:
    """Wait until the bytes of the file `path` are on the disk. If `path` is a folder, wait for its list of names. The
    call is fsync, and F_FULLFSYNC on macOS.
    """
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
    """Create the folder `path` and its missing parents. Each parent is synced, so that a power cut cannot lose the
    folder. An existing folder is left as it is.
    """
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the `with` block must write a file or a folder there. After the block, the new content is
    synced to disk and renamed to `path`. If the block raises, the new content is deleted and `path` keeps its old
    content. Missing parent folders of `path` are created. Raises OSError if `path` is a folder that is not empty.
    """
    make_folder(path.parent)
    with _held_folder(path) as folder:
        try:
            yield folder / path.name
            assert (folder / path.name).exists(), f"nothing was written for {path.name}"
            _sync_all(folder / path.name)
            (folder / path.name).replace(path)
            delete(folder)
            sync(path.parent)
        finally:
            delete(folder)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a new temporary folder beside `path`; the block must write files there. After the block, the files are synced and
    the folder is renamed to `path`. Raises OSError if `path` is a folder with files. If the block raises, the temporary folder
    is deleted. Missing parent folders are created.
    """
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
    """Create a temporary folder beside `path`, and yield its path. This process holds a lock on the folder until the
    `with` block ends. The block must rename or delete the folder.

    The system releases the lock when the process ends. `delete_abandoned` therefore recognises the folder of a killed
    process.
    """
    while True:
        temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}-{path.name}")
        temporary.mkdir()
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
    """Yield the temporary files and folders that a killed process left directly in `folder`. Those of a running process
    are not yielded, because it has locked them.
    """
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
    """Delete the temporary files and folders that killed processes left directly in `folder`. Return the number of
    bytes that were freed. Files of running processes are kept.
    """
    freed = 0
    for path in abandoned(folder):
        freed += size_of(path)
        delete(path)
    return freed


def _sync_all(path: Path) -> None:
    for each in [*path.rglob("*"), path]:
        sync(each)


def delete_temporary_files(folder: Path) -> None:
    """Delete the temporary files and folders in `folder` and in all folders below it. A process leaves them if it is
    killed while it writes. The caller must hold the folder's lock. Otherwise the temporary files of a running writer would be
    deleted too.
    """
    for path in list(folder.rglob(f"{TEMPORARY}*")):
        delete(path)


def delete(path: Path) -> None:
    """Delete `path`: a file, a link, or a folder with everything in it. Nothing happens if it does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def size_of(folder: Path) -> int:
    """Return the total size in bytes of all files in a folder and below it, or the size of the file `folder`. Links are not
    followed. A file that is deleted during the call counts as 0.
    """
    total = 0
    for path in (folder, *folder.rglob("*")):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    return total


def format_bytes(count: float) -> str:
    """Return `count`, a number of bytes, as text in decimal units, such as "812 B", "1.2 MB" or "7.75 GB". 1 MB is 10^6
    bytes.
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:  # 999.6 MB is rounded to 1 GB
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def first_line(error: BaseException) -> str:
    """Return the first line of the message of the exception `error`."""
    return str(error).partition("\n")[0]


def error_number(error: BaseException) -> int | None:
    """Return the errno of an exception, such as 28 for a full disk, or None if it has none. If `error` is no system error, the
    number is read from its message ("os error 28"). If MLX could not write a file, the number is that of a full disk.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(error, RuntimeError) and "[write] Unable to write" in str(error):
        return errno.ENOSPC
    found = re.search(r"(?:os error|errno) (\d+)", str(error), re.IGNORECASE)
    return int(found[1]) if found else None


@contextmanager
def explain_disk_errors(table: str, folder: Path, saved: Callable[[], str], needed: Callable[[], int]) -> Iterator[None]:
    """Turn a disk error in the `with` block into a DiskError with a one-line message. A disk error is an exception with
    an errno other than ENOENT (missing file). All other exceptions pass unchanged. `table` and `folder` are the table's
    name and folder. `saved()` returns a text about the rows that are safe, such as "120 rows are kept". `needed()`
    returns the number of bytes that the user must free on a full disk.

    The message for a full disk asks for at least 1 MB. The message for any other error names the folder.
    """
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
    """Return the path of the project folder `folder`, quoted for the shell. A user can paste it after `make PROJECT=`
    in the source checkout.

    An absolute path stays as it is. A relative path stays if it leads to the same folder from the source checkout.
    Otherwise the absolute path is returned.
    """
    usable = folder.is_absolute() or (CHECKOUT / folder).resolve() == folder.resolve()
    return shlex.quote(str(folder if usable else folder.resolve()))
