"""Errors of the GPU are one line with a remedy; a run starts again once, if it got on; a Mac stays awake; signals are heard."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from typing import Any, NoReturn

import pytest

from pipeline import process
from pipeline.cli import exit_code
from pipeline.process import RESTARTED, interruptible, kept_awake, own_command, restarting
from tests import projects

MEMORY = "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)."
TIMEOUT = "[METAL] Command buffer execution failed: Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
WATCHDOG = (
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"
)


@pytest.mark.parametrize(
    ("message", "happened", "remedy"),
    [
        (MEMORY, "not enough memory", "`latentmill plan"),
        (TIMEOUT, "took too long", "micro_batch = 1"),
        (WATCHDOG, "held up the display", "pmset displaysleepnow"),
        ("[write] Unable to write 81 bytes to file.", "disk full", "free some space"),
        ("[malloc] Unable to allocate 5 bytes.", "not enough memory", "`latentmill plan"),
    ],
)
def test_an_error_of_the_gpu_is_one_line_with_the_remedy_and_ends_the_command(message, happened, remedy, capsys):
    def wrong(text: str) -> NoReturn:
        raise RuntimeError(text)

    assert exit_code(lambda: wrong(message)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert happened in line and remedy in line and message.split(".")[0] in line
    assert line.endswith("the same command goes on.")
    with pytest.raises(RuntimeError, match="shapes"):  # any other is a bug
        exit_code(lambda: wrong("shapes (3,) and (4,) cannot be broadcast"))


class Again(Exception):  # noqa: N818
    """Stands for the new process."""


@pytest.mark.parametrize(
    ("message", "before", "after", "again"),
    [
        (TIMEOUT, 100, 150, True),
        (WATCHDOG, 100, 150, True),
        (WATCHDOG, 100, 100, False),
        (WATCHDOG, -1, -1, False),
        (MEMORY, 100, 150, False),
        ("shapes", 100, 150, False),
    ],
)
def test_after_a_watchdog_error_a_run_starts_again_once_if_its_newest_checkpoint_is_newer_than_before(
    message, before, after, again, tmp_path, monkeypatch
):
    def start_again() -> NoReturn:
        raise Again

    monkeypatch.delenv(RESTARTED, raising=False)
    for expected in (Again if again else RuntimeError, RuntimeError):
        steps = iter([before, after])
        monkeypatch.setattr(process, "newest_checkpoint", lambda artifacts, steps=steps: next(steps))
        with pytest.raises(expected), restarting(lambda: tmp_path, lambda line: None, start_again):
            raise RuntimeError(message)
        assert os.environ.get(RESTARTED) == ("1" if again else None)


def test_on_a_mac_a_stage_keeps_the_machine_awake_until_it_ends(tmp_path, monkeypatch):
    program = tmp_path / "caffeinate"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\nexec sleep 600\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    started: list[Any] = []
    real = process.subprocess.Popen

    def popen(*given: Any, **more: Any) -> Any:
        started.append(real(*given, **more))
        return started[-1]

    monkeypatch.setattr(process.subprocess, "Popen", popen)
    with kept_awake():
        assert not started
    monkeypatch.setattr(sys, "platform", "darwin")
    with kept_awake():
        assert started[0].poll() is None
        assert started[0].args == [str(program), "-i", "-w", str(os.getpid())]
    assert started[0].poll() is not None


def test_a_command_that_starts_itself_again_takes_no_code_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "pipeline").mkdir()
    for name in ("pipeline/__main__.py", "pipeline/__init__.py", "click.py"):
        (tmp_path / name).write_text("print('foreign code')")
    monkeypatch.setattr(sys, "argv", ["latentmill"])
    done = subprocess.run([*own_command(), "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "foreign" not in done.stdout and "Commands" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_acknowledged_while_native_code_runs(number):
    said, before = [], signal.getsignal(number)
    with interruptible(said.append) as stop:
        threading.Timer(0.02, os.kill, (os.getpid(), number)).start()
        while not stop.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # much longer, in C, in which no handler of Python runs
            said.append("done")
    assert said == ["stopping after the current item; a second signal ends at once", "done"]
    assert signal.getsignal(number) is before


def test_a_closed_terminal_ends_a_run_as_one_ctrl_c_does_however_often_it_says_so(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup themselves
    try:
        with interruptible() as stop:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
            assert stop.is_set()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with interruptible() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_that_comes_while_a_stage_ends_begins_no_further_stage(number):
    # Not signal.pause: a signal just before it would be lost.
    ends = f"signal.signal({number:d}, lambda *_: sys.exit(0))"
    child = f"import signal, sys, time; {ends}; print('ready', flush=True); [time.sleep(0.01) for _ in iter(int, 1)]"
    code = f"import sys; from pipeline.process import run_apart; sys.exit(run_apart([sys.executable, '-c', {child!r}]))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        # A terminal sends Ctrl-C to all its processes.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        assert process.wait(projects.HANG) == 128 + number
