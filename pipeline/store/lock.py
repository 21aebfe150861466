"""Lock files: one process at a time writes a table, or the texts of the user. The system frees the lock of an ended process."""

from __future__ import annotations

import datetime
import fcntl
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from pipeline.store.disk import open_own

PATIENCE = 10.0  # seconds that one writer of texts waits for another, which usually takes milliseconds
LOOK_SECONDS = 0.02  # between two attempts
MOST_BYTES = 100_000  # of a lock file: a command line may be long


class Busy(ValueError):  # noqa: N818  (another process, not a mistake)
    """Another process has the lock. The message names it."""


@contextmanager
def locked(path: Path, patience: float = 0.0) -> Iterator[int]:
    """Exclusive, freed with its process. Raises Busy if not released in `patience` seconds.

    Yields the open file: a child process that inherits it holds the lock too.
    """
    handle = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            _take(handle, 1 + math.ceil(patience / LOOK_SECONDS))
        except BlockingIOError:
            holder = _written_holder(path)
            raise Busy(f"{path.parent} is being written by {holder}; wait for it or stop it") from None
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(_this_process()).encode())
        yield handle
    finally:
        # The file is never deleted: after a deletion, two processes could each lock a file of that name.
        os.close(handle)


def _take(handle: int, left: int) -> None:
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        try:
            # Who only looks, as `lock_holder` does, shares the lock for a moment. Such a lock can be shared and is no reason
            # to give up: try again at once.
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(handle, fcntl.LOCK_UN)
        except BlockingIOError:  # a writer has it
            left -= 1
            if not left:
                raise
            time.sleep(LOOK_SECONDS)


def texts_lock(project: Path) -> AbstractContextManager[int]:
    """For changes of the user's texts: held from reading them until new ones are written."""
    tables = project / "tables"
    tables.mkdir(exist_ok=True)
    return locked(tables / "texts.lock", PATIENCE)


def lock_holder(path: Path) -> str:
    """Such as "process 12 on HOST (`COMMAND`, since TIME)"; "" if no process holds the lock."""
    try:
        written = _written(path)
        if written["host"] == platform.node():
            os.kill(int(written["pid"]), 0)  # raises if that process has ended
        return _written_holder(path) if is_locked(path) else ""
    except PermissionError:
        return _written_holder(path)  # a process of another user
    except UNREADABLE:
        return ""


def is_locked(path: Path) -> bool:
    """By this process, another one, or a child that inherited the lock."""
    try:
        handle = open_own(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        # Shared, and only for a moment: a writer that starts just then sees that it is no writer's, and tries again.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _written_holder(path: Path) -> str:
    try:
        written = _written(path)
        return f"process {written['pid']} on {written['host']} (`{written['command']}`, since {written['start']})"
    except UNREADABLE:
        return "another process"  # it has the lock but has not written its name yet


# What a file that no process of ours wrote may raise. OverflowError: its pid is too large.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError)


def _written(path: Path) -> dict[str, Any]:
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        found: dict[str, Any] = json.loads(file.read(MOST_BYTES))
    return found


def _this_process() -> dict[str, str | int]:
    program = Path(sys.argv[0] or "python")
    # For `python -m pipeline`, argv[0] is .../pipeline/__main__.py.
    name = "latentmill" if program.name == "__main__.py" else program.name
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "command": shlex.join([name, *sys.argv[1:]]),
        "start": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
    }
