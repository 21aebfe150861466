"""Runs code in a process that kills itself just before a chosen fsync.

Every step of a write that must not be reordered ends with an fsync, so these are the moments at which the disk can be in a
state of its own. Moments are counted, never timed: the same run has the same number of them.

    python -m tests.pipeline.killing NUMBER MODULE ARGUMENTS...     NUMBER 0: no kill
"""

from __future__ import annotations

import fcntl
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KILLED = -signal.SIGKILL  # the exit code of a killed process


def run_and_kill(number: int, module: str, *arguments: str) -> tuple[int, str]:
    """Run `MODULE.main(ARGUMENTS)` in a process that kills itself just before its fsync NUMBER (0: never).

    Returns its exit code and what it wrote to standard output and error.
    """
    words = [sys.executable, "-m", "tests.pipeline.killing", str(number), module, *arguments]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode in (0, KILLED), f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.returncode, done.stdout + done.stderr


def count_syncs(module: str, *arguments: str) -> int:
    """Run `MODULE.main(ARGUMENTS)` to its end in a process of its own. Returns how often it called fsync."""
    code, text = run_and_kill(0, module, *arguments)
    assert code == 0, text
    return int(text.rpartition("syncs: ")[2].split()[0])


def _main() -> None:
    last, module, *arguments = sys.argv[1:]
    count, sync = 0, os.fsync

    def fsync(handle: int) -> None:
        nonlocal count
        count += 1
        if count == int(last):
            os.kill(os.getpid(), signal.SIGKILL)
        sync(handle)
        if last == "0":  # said each time: the command may end its process at once
            os.write(2, f"\nsyncs: {count}\n".encode())

    vars(fcntl).pop("F_FULLFSYNC", None)  # on macOS the store would call that instead
    os.fsync = fsync
    importlib.import_module(module).main(arguments)


if __name__ == "__main__":
    _main()
