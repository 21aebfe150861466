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
from collections.abc import Callable
from pathlib import Path

import pytest

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


def count_syncs(run: Callable[[], object]) -> int:
    calls: list[int] = []
    sync = os.fsync

    def fsync(handle: int) -> None:
        calls.append(handle)
        sync(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(fcntl, "F_FULLFSYNC", raising=False)  # on macOS the store would call that instead
        patch.setattr(os, "fsync", fsync)
        run()
    return len(calls)


def _main() -> None:
    last, module, *arguments = sys.argv[1:]
    count, sync = 0, os.fsync

    def fsync(handle: int) -> None:
        nonlocal count
        count += 1
        if count == int(last):
            os.kill(os.getpid(), signal.SIGKILL)
        sync(handle)

    vars(fcntl).pop("F_FULLFSYNC", None)
    os.fsync = fsync
    importlib.import_module(module).main(arguments)


if __name__ == "__main__":
    _main()
