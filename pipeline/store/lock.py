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
from pathlib import Path
from types import TracebackType

PATIENCE = 10.0  # seconds that one writer of texts waits for another, which usually takes milliseconds
LOOK_SECONDS = 0.02  # between two attempts


class Lock:
    """An exclusive lock, used as `with Lock(path): ...`. One process at a time can hold it. `path` is the lock file, which is
    created if needed. If the process is killed, the system releases the lock. Raises ValueError if another process holds the
    lock and does not release it within `patience` seconds. The message says which one.
    """

    def __init__(self, path: Path, patience: float = 0.0) -> None:
        self.path, self.attempts = path, 1 + math.ceil(patience / LOOK_SECONDS)
        self._handle: int | None = None

    def __enter__(self) -> Lock:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take(handle)
            os.ftruncate(handle, 0)
            os.write(handle, json.dumps(_this_process()).encode())
        except BlockingIOError:
            os.close(handle)
            holder = _written_holder(self.path)
            raise ValueError(f"{self.path.parent} is being written by {holder}; wait for it or stop it") from None
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        return self

    def _take(self, handle: int) -> None:
        """Lock the open file whose descriptor is `handle`. If another process holds the lock, try again after
        `LOOK_SECONDS`. Raises BlockingIOError if all `self.attempts` attempts fail.
        """
        for left in reversed(range(self.attempts)):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not left:
                    raise
                time.sleep(LOOK_SECONDS)
            else:
                return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The file is never deleted: after a deletion, two processes could each lock a file of that name.
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def texts_lock(project: Path) -> Lock:
    """Return the lock for a change of the user's texts, such as captions and caption files. It belongs to the folder
    `project`. A process holds it while it reads the texts and writes new ones. Another process waits for it, at most 10
    seconds.
    """
    tables = project / "tables"
    tables.mkdir(exist_ok=True)
    return Lock(tables / "texts.lock", PATIENCE)


def lock_holder(path: Path) -> str:
    """Describe the process that holds the lock file `path` now, such as "process 12 on HOST (`COMMAND`, since TIME)". Return
    "" if no process holds it. The call does not take the lock, so it never blocks a writer.
    """
    try:
        written = json.loads(path.read_text())
        if written["host"] == platform.node():
            os.kill(written["pid"], 0)  # raises if that process has ended
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        return _written_holder(path)  # a process of another user
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _written_holder(path)
    finally:
        os.close(handle)
    return ""


def _written_holder(path: Path) -> str:
    """Describe the process that last wrote its name into the lock file `path`. The text is like "process 12 on HOST
    (`COMMAND`, since TIME)". Return "another process" if the file names no process. The process may have ended already.
    """
    try:
        written = json.loads(path.read_text())
        return f"process {written['pid']} on {written['host']} (`{written['command']}`, since {written['start']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # it has the lock but has not written its name yet


def _this_process() -> dict[str, str | int]:
    """Return what a lock file records about this process. `pid` is the process id, a number. `host` is the name of the
    machine. `command` is the command line as text. `start` is the current time as text in ISO 8601 form, with a space
    in place of the "T".
    """
    program = Path(sys.argv[0] or "python")
    name = program.parent.name if program.name == "__main__.py" else program.name
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "command": shlex.join([name, *sys.argv[1:]]),
        "start": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
    }
