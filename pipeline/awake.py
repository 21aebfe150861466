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
    """No idle sleep on macOS during the block; nothing elsewhere."""
    program = shutil.which("caffeinate") if sys.platform == "darwin" else None
    if program is None:
        yield
        return
    # -w: caffeinate ends with this process, even if that is killed.
    process = subprocess.Popen([program, "-i", "-w", str(os.getpid())], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def newest_checkpoint(artifacts: Path | None) -> int:
    """Step of the newest checkpoint; -1 if there is none."""
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
    """Call `run`. If macOS stopped its GPU work after it saved a new checkpoint, `start_again` instead, once per command."""
    before = newest_checkpoint(artifacts())
    try:
        return run()
    except RuntimeError as error:
        after = newest_checkpoint(artifacts())
        if not may_restart(str(error)) or after <= before or os.environ.get(RESTARTED):
            raise
        say(f"{explain(str(error))} Starting once more from step {after}.")
        os.environ[RESTARTED] = "1"
        # It must replace the process: the GPU context of this one is broken.
        start_again()


def replace_process() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "pipeline", *sys.argv[1:]])


def allow_open_files(wanted: int = FILES) -> None:
    """Raise the limit of open files to `wanted`, or as far as the system allows; never lower it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
