"""`latentmill find` while a process of `latentmill mcp` serves the folder: real processes, a real socket."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.commands.retrieval import resident
from pipeline.commands.retrieval.find import command, kept

CODE = {
    "mail.py": "def send_mail(address, text):\n    server = connect(address)\n    server.deliver(text)\n",
    "näme.py": "def print_name(person):\n    text = '\u2028 ß'\n    print(person.name, text)\n",
    "sums.py": "def add_prices(items):\n    total = sum(item.price for item in items)\n    return total\n",
}
ASKED: list[list[str]] = [
    ["send a mail"],
    ["send a mail", "--json", "--threshold", "0"],
    ["print a name", "--semantic", "--json"],
    ["prices of items", "--lexical", "--json"],
    ["send a mail", "--regex", r"^def \w+_prices", "--threshold", "0", "--json"],
    ["send a mail", "--path", "s*.py", "--path", "n*.py", "--threshold", "0", "--limit", "1"],
    ["qwzx vbnmt plork"],
]
QUESTION = {"query": "x", "mode": "hybrid", "limit": 9, "patterns": [], "regex": "", "threshold": 0.0}
ODD: list[dict[str, Any]] = [{"folder": "/"}, {"limit": 10**9}, {"limit": True}, {"mode": "all"}, {"patterns": [{}]}]
ODD += [{"regex": "("}, {"query": "\ud800"}]
HOSTILE = [b"", b"\n", b"\xff\xfe\0\n", b"[" * 100_000 + b"\n", b"[1]\n"]
HOSTILE += [json.dumps(QUESTION | odd).encode() + b"\n" for odd in ODD]


@contextmanager
def code_in(place: Path) -> Iterator[Path]:
    """A folder of code below `place`, the current folder; its cache is below it, too."""
    (place / "code").mkdir()
    for name, text in CODE.items():
        (place / "code" / name).write_text(text)
    (place / "secret.py").write_text("def password():\n    secret = 'hunter2'\n    return secret\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.chdir(place)
        for patience in ("TURN", "ANSWER"):  # however busy the machine is
            patch.setattr(resident, patience, 600.0)
        find("send a mail")  # reads the folder
        yield place / "code"


@contextmanager
def up(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that serves the folder, and must say nothing."""
    words = [sys.executable, "-m", "pipeline", "mcp", str(folder)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(words, stdin=pipe, stdout=null, stderr=pipe) as process:
        try:
            while not any(resident.FOLDER.glob(f"*-{process.pid}")):
                assert process.poll() is None
                time.sleep(0.05)
            yield process
        finally:
            process.kill()
        assert process.stderr and process.stderr.read() == b""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with code_in(tmp_path) as folder:
        yield folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a process that is up."""
    with code_in(tmp_path_factory.mktemp("served")) as folder, up(folder) as process:
        find("send a mail")  # opens the index there
        yield path_of(folder, process.pid)


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `find` was told by a process that is up, call by call."""
    told: list[Any] = []
    ask = resident.ask
    monkeypatch.setattr(resident, "ask", lambda *given: told.append(ask(*given)) or told[-1])
    return told


def path_of(folder: Path, number: int) -> Path:
    return resident.FOLDER / f"{resident.name_of(kept(folder))}-{number}"


def find(*words: str, folder: str = "code") -> tuple[bytes, bytes, int]:
    done = CliRunner().invoke(command, [*words[:1], folder, *words[1:]], catch_exceptions=False, standalone_mode=False)
    return done.stdout_bytes, done.stderr_bytes, done.return_value


def tell(path: Path, message: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(message)
        if not message.endswith(b"\n"):
            connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as stream:
            return stream.read()


def test_an_answer_of_a_process_that_is_up_is_byte_for_byte_that_of_find_alone(served, replies, monkeypatch):
    def both(*words: str, **given: str) -> list[tuple[bytes, bytes, int]]:
        asked = find(*words, **given)
        assert replies[-1] is not None, words
        with monkeypatch.context() as patch:
            patch.setattr(resident, "ask", lambda *given: None)
            return [asked, find(*words, **given)]

    for words in ASKED:
        asked, alone = both(*words)
        assert asked == alone, words
    monkeypatch.chdir("code")
    Path("web.py").write_text("def download_page(url):\n    answer = get(url)\n    return answer.text\n")
    (out, said, code), alone = both("download a page", folder=".")
    assert (out, b"", code) == alone and out.startswith(b"web.py:1  download_page  ")
    assert re.fullmatch(rb"the folder has changed: 1 file read, 2 texts of functions encoded; .*\n", said)


def test_a_find_that_is_answered_loads_no_numpy_no_mlx_and_no_table(served):
    words = [sys.executable, "-X", "importtime", "-m", "pipeline", "find", "send a mail", "code"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "click" in loaded and "def send_mail" in done.stdout
    assert not loaded & {"numpy", "mlx", "pyarrow", "lance", "lancedb", "tokenizers", "transformers", "asyncio"}


def test_hostile_bytes_get_an_error_and_the_next_question_its_answer(served, replies):
    for message in HOSTILE:
        assert list(json.loads(tell(served, message))) == ["error"], message
    outside = json.dumps(QUESTION | {"query": "the secret password", "patterns": ["*", "../*", "/*"]}).encode() + b"\n"
    assert b"sums.py" in (told := tell(served, outside)) and b"hunter2" not in told
    with suppress(ConnectionError):  # it is cut off
        tell(served, b"x" * 2_000_000)
    with socket.socket(socket.AF_UNIX) as gone:  # as Ctrl-C ends `find`
        gone.connect(str(served))
        gone.sendall(json.dumps(QUESTION).encode() + b"\n")
    assert find("send a mail")[2] == 0 and replies[-1] is not None


def test_only_this_user_reaches_the_socket_and_another_version_or_a_folder_that_others_reach_is_not_asked(
    served, tmp_path, monkeypatch
):
    assert (served.stat().st_mode & 0o777, served.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    project = kept(Path("code").resolve())
    assert resident.ask(project, QUESTION) is not None
    for name, other in (("version", "0.0.9"), ("newest_code", 1)):  # or of older code
        with monkeypatch.context() as patch:
            patch.setattr(resident, name, lambda other=other: other)
            assert resident.ask(project, QUESTION) is None
    for mode, there in ((0o755, False), (0o700, True)):
        # Short, since a socket's path may be.
        with tempfile.TemporaryDirectory(dir="/tmp") as place:
            Path(place).chmod(mode)
            (Path(place) / served.name).symlink_to(served)
            monkeypatch.setattr(resident, "FOLDER", Path(place))
            assert (resident.ask(project, QUESTION) is not None) == there
    (tmp_path / "link").symlink_to(served.parent)
    for name in ("link", "missing"):
        monkeypatch.setattr(resident, "FOLDER", tmp_path / name)
        assert resident.ask(project, QUESTION) is None


def test_a_process_that_was_killed_or_stands_still_leaves_the_answer_to_find(folder, replies, monkeypatch):
    with up(folder) as process:
        answered = find("send a mail")
        assert replies[-1] is not None
        monkeypatch.setattr(resident, "TURN", 0.1)
        process.send_signal(signal.SIGSTOP)
        assert find("send a mail") == answered and replies[-1] is None
        process.kill()
        process.wait()
        assert find("send a mail") == answered and replies[-1] is None
        left = path_of(folder, process.pid)
        assert left.exists()
    with up(folder) as process:
        assert not left.exists()
        assert process.stdin
        process.stdin.close()
        assert process.wait() == 0 and not path_of(folder, process.pid).exists()


def test_a_process_that_ends_in_the_middle_leaves_the_answer_to_find(folder, replies):
    alone = find("send a mail")[0]
    path = path_of(folder, 0)
    resident.FOLDER.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer(reply: bytes) -> None:
            with listener.accept()[0] as connection:
                connection.recv(10_000)
                connection.sendall(reply)

        try:
            for reply in (b"", b" ", b' {"answers": [', b"\xff", b' {"error": "no"}'):
                thread = threading.Thread(target=answer, args=(reply,))
                thread.start()
                assert find("send a mail") == (alone, b"", 0) and replies[-1] is None, reply
                thread.join()
        finally:
            path.unlink()
