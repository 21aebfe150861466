"""Atomic file writes that survive a power cut, and disk errors as one line."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = ".tmp-"  # prefix of the names of files that are still being written


class DiskError(ValueError):
    """The disk refuses to write, for example because it is full. The message is one line for the user."""


LEAST = 10**8  # bytes to free, if nobody knows how many are needed
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def stamp(path: Path) -> tuple[int, int, int]:
    """(size, time of change in ns, inode): a file with the same stamp has the same content. Raises OSError, FileNotFoundError
    for a folder, a named pipe or a device too: reading one could wait for ever.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, "is no regular file", str(path))
    return found.st_size, found.st_mtime_ns, found.st_ino


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


def open_own(path: Path, flags: int) -> int:
    """A file that this program wrote or will write. Raises ValueError for a link, a named pipe or a device.

    A project may come from elsewhere: a link in its tables could lead a writer to any file of the user.
    """
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise ValueError(f"{path} is no regular file: delete it") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{path} is no regular file: delete it")
    return handle


def refuse_links(folder: Path) -> None:
    """Raises ValueError if the folder of a table, the folder above it, or anything in it is a link: see `open_own`."""
    found = [folder.parent, folder, *(Path(place, name) for place, *names in os.walk(folder) for name in (*names[0], *names[1]))]
    if link := next((path for path in found if path.is_symlink()), None):
        raise ValueError(f"{link} is a link, and nothing is written through links in tables/: delete it")


def make_folder(path: Path) -> None:
    """Each parent is synced, so that a power cut cannot lose the folder."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, then sync and rename it to `path`; OSError if that is a folder with files."""
    make_folder(path.parent)
    # The temporary path lies in a folder of its own, which is locked until the block ends. The system frees the lock of a
    # killed process: so `abandoned` tells its files from those of a running one.
    while True:
        folder = path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}-{path.name}")
        folder.mkdir()
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        taken = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process is about to delete it as abandoned
            taken = False
        except OSError:  # some network file systems have no locks
            pass
        if taken and folder.exists():
            break
        delete(folder)
        os.close(handle)
    try:
        temporary = folder / path.name
        yield temporary
        assert temporary.exists(), f"nothing was written for {path.name}"
        # Without it, all of 10 simulated power cuts lost rows, and 4 left an unreadable file; with it, none of 15.
        for each in [*temporary.rglob("*"), temporary]:
            sync(each)
        temporary.replace(path)
        delete(folder)
        sync(path.parent)
    finally:
        delete(folder)
        os.close(handle)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """As `atomic_write`, for a folder: the temporary one exists already, and the block writes files into it."""
    with atomic_write(path) as temporary:
        temporary.mkdir()
        yield temporary


def abandoned(folder: Path, *, below: bool = False) -> Iterator[Path]:
    """Temporary files and folders that killed processes left directly in `folder`, or anywhere `below` it."""
    for path in sorted(folder.rglob(f"{TEMPORARY}*") if below else folder.glob(f"{TEMPORARY}*")):
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


def delete_abandoned(folder: Path, *, below: bool = False) -> None:
    for path in abandoned(folder, below=below):
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


def free_bytes(folder: Path) -> int:
    """Of the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())


def require_room(what: str, writes: Iterable[tuple[Path, int]]) -> None:
    """Raise DiskError if `what` will write more bytes into these folders, on each disk together, than are free there."""
    sums: dict[int, tuple[Path, int]] = {}
    for folder, count in writes:
        device = _existing(folder).stat().st_dev
        first, before = sums.get(device, (folder, 0))
        sums[device] = first, before + count
    for folder, count in sums.values():
        if count > (free := free_bytes(folder)):
            raise DiskError(
                f"{what} needs about {format_bytes(count)} on the disk of {folder}, and {format_bytes(free)} are free there: "
                f"free {format_bytes(count - free)} more"
            )


def format_bytes(count: float) -> str:
    """Decimal units, such as "812 B", "1.2 MB" or "7.75 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:  # 999.6 MB is rounded to 1 GB
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


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
        if number in FULL:
            line = f"disk full while writing {table}: {safe}; free {format_bytes(max(needed(), LEAST))} or more and run again"
        else:
            line = f"cannot write {table} in {folder}: {os.strerror(number).lower()}; {safe}"
        raise DiskError(line) from error
