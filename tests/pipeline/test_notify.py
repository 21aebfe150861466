"""The user is told how a command ended, and a way that does not work delays or breaks nothing."""

from __future__ import annotations

import contextlib
import shlex
import socket
import sys
import threading
import time
from pathlib import Path

import click
import pytest

from pipeline import notify
from pipeline.errors import Stopped
from pipeline.notify import WAY, notifying
from tests import projects
from tests.toy.project import make

SAY = [sys.executable, "-c", "import sys, pathlib; pathlib.Path(sys.argv[1]).open('a').write(repr(sys.argv[2:]) + '\\n')"]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which the command of the notification writes its words."""
    monkeypatch.setenv(WAY, shlex.join([*SAY, str(tmp_path / "told")]))
    return tmp_path / "told"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, "cats: run train ended"),
        (Stopped("train: stopped"), "cats: run train stopped"),
        (KeyboardInterrupt(), "cats: run train stopped"),
        (click.exceptions.Exit(130), "cats: run train stopped"),
        (click.exceptions.Exit(137), "cats: run train failed"),
        (ValueError("a picture $(touch x); \x1b[31m\nred"), "cats: run train failed: a picture $(touch x); \\x1b[31m red"),
    ],
)
def test_a_command_is_told_how_it_ended_in_one_word_without_control_characters(told, error, said):
    def work() -> None:
        with notifying("cats", "run train"):
            if error:
                raise error

    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        work()
    assert told.read_text() == f"{[said]!r}\n"


def test_a_run_of_several_stages_is_told_once_and_a_failed_one_with_its_reason(told, tmp_path):
    folder = make(tmp_path / "project")
    projects.latentmill(folder, "run", projects.Project(folder).stage_names[-1])
    assert told.read_text().count("\n") == 1 and "ended" in told.read_text()
    projects.latentmill(folder, "run", "nothing", code=2)
    assert "failed: nothing: no such stage" in told.read_text()


HANGING, DRIPPING = "{python} -c 'import time; time.sleep(600)'", "http://127.0.0.1:{port}/"


@pytest.mark.parametrize("way", ["/no/such/program", "false", "'", "http://127.0.0.1:1/", "http://[", HANGING, DRIPPING])
def test_a_way_that_does_not_work_is_one_line_and_neither_delays_nor_fails_the_command(monkeypatch, capsys, way):
    monkeypatch.setattr(notify, "SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, args=(server,), daemon=True).start()
        monkeypatch.setenv(WAY, way.format(python=sys.executable, port=server.getsockname()[1]))
        with notifying("cats", "run train"):
            pass
    said = capsys.readouterr().err
    assert said.startswith(WAY) and len(said.splitlines()) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "notify" and not thread.daemon]


def drip(server: socket.socket) -> None:
    """An answer whose every byte comes in time, for ever."""
    with contextlib.suppress(OSError), server.accept()[0] as connection:
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while True:
            connection.sendall(b"x")
            time.sleep(0.05)
