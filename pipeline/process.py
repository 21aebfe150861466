"""What a process needs of its machine: streams, signals, no idle sleep, open files, peak memory; what the device's errors say."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from stages.shortage import TEXTS

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed
GONE = frozenset({errno.EPIPE, errno.EIO})  # the reader of a pipe has ended, the terminal was closed
ADDRESS_SPACE = 4 * 1000**3  # bytes; with 2 GB a stage hung
FILES = 4096  # open files: shards, indices and weights of a large project
RESTARTED = "LATENTMILL_RESTARTED"  # set in a process that was started again, so that it happens once
ASIDE = "LATENTMILL_ASIDE"  # set in a process whose standard output is the standard error of another


# Standard streams


class Stream(io.TextIOWrapper):
    """Standard output or error. A reader that has gone ends no command: what it does matters more than who listens."""

    def __init__(self, number: int, encoding: str, *, may_fail: bool) -> None:
        buffer = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        # With backslashreplace, a character that the encoding lacks is written as an escape.
        super().__init__(buffer, encoding, "backslashreplace", line_buffering=True)
        self._may_fail = may_fail

    def write(self, text: str, /) -> int:
        with self._heard():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._heard():
            super().flush()

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What could not be written stays in the buffer: the next attempt would fail again.
            with Path(os.devnull).open("wb") as null:
                os.dup2(null.fileno(), self.fileno())
            if not self._may_fail and error.errno not in GONE:
                raise


def open_streams() -> None:
    """Standard streams that can be used, whatever the process was given, and escape what their encoding lacks."""
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115  (of this process until it ends)
    encodings = [getattr(stream, "encoding", None) or "utf-8" for stream in (sys.stdout, sys.stderr)]
    aside = os.environ.pop(ASIDE, "") != ""
    sys.stdout, sys.stderr = Stream(1, encodings[0], may_fail=aside), Stream(2, encodings[1], may_fail=True)


def require_address_space() -> None:
    """Raises ValueError under a small `ulimit -v`: native threads of Lance then abort or hang, without a word."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < ADDRESS_SPACE:
        least = f"{ADDRESS_SPACE // 1000**3} GB"
        raise ValueError(f"the limit of address space is {limit / 1e9:.1f} GB (ulimit -v), less than {least}: raise it")


def refuse_fork(*, opening: bool = False) -> None:
    """Raises ValueError in a process that was forked from one that has opened a project: threads of Lance and MLX are not forked,
    and a stage would crash without a word.
    """
    if opening and not _opened:
        _opened.append(os.getpid())
    elif not opening and _opened and _opened[0] != os.getpid():
        raise ValueError(
            "a stage cannot run in a fork of a process that has used a project: "
            'start the process with multiprocessing.get_context("spawn")'
        )


_opened: list[int] = []  # the process that opened a project first


def use_utf8() -> None:
    """Start again if names of files cannot be UTF-8, as with LC_ALL=C where Python's UTF-8 mode is off."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        replace_process()


# Signals


@contextlib.contextmanager
def interruptible(say: Callable[[str], None] = lambda line: None) -> Iterator[threading.Event]:
    """Yield an event that the first signal sets (only in the main thread); a second raises KeyboardInterrupt, except SIGHUP.

    The way of Ctrl-C: `say` tells that the current item is finished first; this event is `run.report.stop()` of the stage, which
    ends after its batch; runner.commit stores what was yielded; if rows are left, runner.run raises Stopped with "NAME: stopped;
    N crops done and saved, M to do. Run the same command to go on.", and cli.exit_code prints that line and gives 130. Training
    writes a checkpoint first (stages/tuner/loop.py). A second signal ends in "interrupted; what was saved is kept".
    """
    stop = threading.Event()

    def handle(number: int, frame: Any) -> None:
        # A terminal that is closed may send SIGHUP twice: from the shell and from the system.
        if stop.is_set() and number != signal.SIGHUP:
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    # `nohup` starts a command with SIGHUP ignored.
    numbers = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        with _acknowledged(say):
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _acknowledged(say: Callable[[str], None]) -> Iterator[None]:
    """Call `say` at the first signal, even while the main thread computes. Needs Python handlers for both signals."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while number := os.read(reader, 1):
            if number[0] in SIGNALS:
                say("stopping after the current item; a second signal ends at once")
                return

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    # Python runs a handler only when the main thread returns from native code, which may take minutes. The number of the
    # signal arrives in this pipe at once. Only the main thread may set it.
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)


def run_apart(words: Sequence[str], *, quiet: bool = False) -> int:
    """Exit code of a command, run as a process of its own; 128 + the signal that ended it, or that came while it finished.
    `quiet`: it only writes to stderr.
    """
    process: subprocess.Popen[bytes] | None = None
    asked = 0

    def stop(number: int, frame: Any) -> None:
        nonlocal asked
        asked = number
        # Ctrl-C reaches both from the terminal, and the process decides what becomes of it. SIGTERM is passed on.
        if number == signal.SIGTERM and process:
            process.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(words, stdout=2 if quiet else None, env=os.environ | ({ASIDE: "1"} if quiet else {}))
        if asked:  # before it began
            process.terminate()
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    # A process that had done its work takes no notice of the signal: what comes after it must not begin.
    return 128 - code if code < 0 else code or (128 + asked if asked else 0)


# The machine


def strangers_reach(address: str) -> bool:
    """False for one address of an own network, and for a name."""
    import ipaddress  # 3 ms, which every command would take

    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return found.is_global or found.is_unspecified or found.is_multicast


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
    if artifacts is None or not artifacts.is_dir():
        return -1
    from stages.tuner.checkpoint import find_checkpoints

    return max((saved.step for saved in find_checkpoints(artifacts)), default=-1)


def replace_process() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*own_command(), *sys.argv[1:]])


def own_command(module: str = "pipeline") -> list[str]:
    """Starts this program again, with -P: else Python takes modules from the current folder first, which may be a stranger's."""
    by_module = Path(sys.argv[0]).name == "__main__.py"  # `python -m pipeline`, as make does: the folder is trusted already
    return [sys.executable, "-m" if by_module else "-Pm", module]


def allow_open_files(wanted: int = FILES) -> None:
    """Raise the limit of open files to `wanted`, or as far as the system allows; never lower it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@functools.cache
def version(package: str = "latentmill") -> str:
    import importlib.metadata  # 8 ms, which `import pipeline` would take

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def peak_mlx() -> int:
    """Peak active memory of MLX in this process, bytes, since it was last reset; 0 if MLX was never imported."""
    core = sys.modules.get("mlx.core")
    return int(core.get_peak_memory()) if core else 0


# Errors that MLX raises as RuntimeError: of the GPU, a full disk, lost ranks

# (pattern of the message, what happened, what helps, whether a fresh process may go on)
KINDS = (
    (
        r"impacting ?interactivity",
        "macOS ended the GPU work because it held up the display",
        "let the display sleep (`pmset displaysleepnow`) or log out of the desktop, or use [train] micro_batch = 1 and a lower "
        "resolution",
        True,
    ),
    (
        r"gpu timeout|callbackerrortimeout|gpu hang|callbackerrorhang",
        "macOS ended GPU work that took too long",
        "use [train] micro_batch = 1 or a lower resolution, and close programs that use the GPU",
        True,
    ),
    (
        r"\[write\] unable to write",  # MLX gives no error number
        "disk full, or the file cannot be written",
        "free some space and run again",
        False,
    ),
    (
        r"connection to a peer was lost|\[ring\]|nccl",
        "another rank of the run ended, or the network failed",
        "look at the messages of the other ranks",
        False,
    ),
    (
        TEXTS,
        "not enough memory",
        "`latentmill plan` shows what each stage needs and which settings need less",
        False,
    ),
)


def explain(message: str) -> str | None:
    """What happened, `message` and a remedy in one line; None for an unknown error."""
    for pattern, happened, remedy, _ in KINDS:
        if re.search(pattern, message, re.IGNORECASE):
            return f"{happened}: {' '.join(message.split())}; {remedy}. Finished work is kept: the same command goes on."
    return None


def may_restart(message: str) -> bool:
    """True if a fresh process can go on, because macOS ended the GPU work."""
    return next((again for pattern, _, _, again in KINDS if re.search(pattern, message, re.IGNORECASE)), False)


@contextlib.contextmanager
def restarting(
    artifacts: Callable[[], Path | None], say: Callable[[str], None], start_again: Callable[[], NoReturn]
) -> Iterator[None]:
    """If macOS stops the block's GPU work after it saved a new checkpoint, `start_again`, once per command."""
    before = newest_checkpoint(artifacts())
    try:
        yield
    except RuntimeError as error:
        after = newest_checkpoint(artifacts())
        if not may_restart(str(error)) or after <= before or os.environ.get(RESTARTED):
            raise
        say(f"{explain(str(error))} Starting once more from step {after}.")
        os.environ[RESTARTED] = "1"
        # It must replace the process: the GPU context of this one is broken.
        start_again()
