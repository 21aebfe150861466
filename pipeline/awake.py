"""What a process needs of a Mac: to stay awake, to open enough files, and to start again after the GPU's watchdog ended it."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

from pipeline.device_errors import explain, may_restart

Result = TypeVar("Result")

FILES = 4096  # open files: shards, indices and weights of a large project
RESTARTED = "LATENTMILL_RESTARTED"  # set in a process that was started again, so that it happens once


@contextlib.contextmanager
def kept_awake() -> Iterator[None]:
    """Return a context manager that prevents idle sleep on macOS, with `caffeinate`. On other systems it does nothing."""
    program = shutil.which("caffeinate") if sys.platform == "darwin" else None
    if program is None:
        yield
        return
    process = subprocess.Popen([program, "-i", "-w", str(os.getpid())], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def newest_checkpoint(artifacts: Path | None) -> int:
    """Return the step of the newest checkpoint in the artifacts folder of a table; -1 if there is none."""
    if artifacts is None or not artifacts.is_dir():
        return -1
    from stages.tuner.checkpoint import find_checkpoints

    return max((saved.step for saved in find_checkpoints(artifacts)), default=-1)


def run_with_restart(
    run: Callable[[], Result],
    artifacts: Callable[[], Path | None],
    say: Callable[[str], None],
    start_again: Callable[[], NoReturn],
) -> Result:
    """Call `run` and return its result. An error of `run` is raised. But if macOS stopped its GPU work and `run` has
    saved a new checkpoint, `start_again()` is called instead. This happens only once per command. `artifacts()` returns
    the folder in which `run` saves its checkpoints, or None if there is none. `say` is called with one line for the
    user before `start_again`.

    `start_again` must replace the process, because the GPU context of the old process is broken.
    """
    before = newest_checkpoint(artifacts())
    try:
        return run()
    except RuntimeError as error:
        after = newest_checkpoint(artifacts())
        if not may_restart(str(error)) or after <= before or os.environ.get(RESTARTED):
            raise
        say(f"{explain(str(error))} Starting once more from step {after}.")
        os.environ[RESTARTED] = "1"
        start_again()


def replace_process() -> NoReturn:
    """Replace this process by one that runs the same command."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "pipeline", *sys.argv[1:]])


def allow_open_files(wanted: int = FILES) -> None:
    """Raise this process's limit of open files to `wanted`, or as far as the system allows. A higher limit is kept. If
    the system refuses, nothing changes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
