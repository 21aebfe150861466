"""One writer at a time: a lock file that says who holds it. The system frees it when its process ends, however it ends."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from types import TracebackType


class Lock:
    """`with Lock(path):` holds the lock. ValueError in one line, naming the holder, if another process has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def __enter__(self) -> Lock:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, 0)
            os.write(handle, json.dumps(_ourselves()).encode())
        except BlockingIOError:
            os.close(handle)
            raise ValueError(f"{self.path.parent} is being written by {holder(self.path)}; wait for it or stop it") from None
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The file stays: were it deleted, a second and a third process could each lock a file of that name.
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def holder(path: Path) -> str:
    """Who wrote their name into a lock file, in words."""
    try:
        who = json.loads(path.read_text())
        return f"process {who['pid']} on {who['host']} (`{who['command']}`, since {who['start']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # it has the lock and has not yet written who it is


def held(path: Path) -> str:
    """Who holds the lock now, in words; empty if nobody does."""
    try:
        who = json.loads(path.read_text())
        if who["host"] == platform.node():
            os.kill(who["pid"], 0)  # who is gone holds nothing; to try the lock could get in a new writer's way
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        return holder(path)  # a process of another user
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return holder(path)
    finally:
        os.close(handle)
    return ""


def _ourselves() -> dict[str, str | int]:
    program = Path(sys.argv[0] or "python")
    name = program.parent.name if program.name == "__main__.py" else program.name
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "command": shlex.join([name, *sys.argv[1:]]),
        "start": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
    }
