"""Every command of both pipelines with odd standard streams, locales and limits: one line or the right answer."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from pipeline import cli
from pipeline.project.project import Project
from pipeline.queue import Queue
from tests import projects
from tests.pipeline.sweeps import life
from tests.stages.retrieval import project as small

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform != 'linux'", reason="/dev/full, and limits of address space")]

FILES = 64
COLUMNS = 20
SECONDS = 120  # after which a command counts as hanging
NEVER = ("Traceback", "panicked", "RUST_BACKTRACE", "Fatal Python", "terminate called", "Exception ignored", "core dumped")
CLOSED_TERMINAL = "import os, pty, sys; a, b = pty.openpty(); os.close(a); os.dup2(b, 0); os.execv(sys.argv[1], sys.argv[1:])"
CONDITIONS = {  # what bash does with the words of the command
    **{f"closed {number}": f'exec "$@" {number}>&-' for number in range(3)},
    **{f"full {number}": f'exec "$@" {number}>/dev/full' for number in (1, 2)},
    "slow 0": 'exec "$@" < <(sleep 0.5)',
    **{f"slow {number}": f'exec "$@" {number}> >(sleep 0.5; cat >&{number})' for number in (1, 2)},
    "broken 0": f"exec {sys.executable} -c '{CLOSED_TERMINAL}' \"$@\"",
    **{f"broken {number}": f'exec "$@" {number}> >(true)' for number in (1, 2)},
    "LC_ALL=C": 'LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 exec "$@"',
    "columns": 'exec "$@" 2>&1',  # both to the terminal
    "address space": 'ulimit -v 900000; exec "$@"',
    "files": f'ulimit -n {FILES}; exec "$@"',
}
# What a command needs beside --project. A new command is tried with what click says that it requires.
GIVEN = {
    "init": ["--images", "{project}/images", "{project}/new"],
    "query": ["select 1 as one"],
    "follow": ["{input}"],
    "launch": ["--ranks", "2"],
    "view": ["--no-open", "--port", "{port}"],
    "run": ["{last}"],
    "replay": ["1"],
    "generate": ["a red cup"],
    "merge": ["last", "last"],
    "extract": ["{weights}/transformer", "--rank", "1"],
    "find": ["count the words", "{project}/code"],
    "mcp": ["{project}/code"],
    "search": ["count the words"],
    "queue add": ["status"],
    "queue log": ["1"],
    "queue cancel": ["1"],
    "queue move": ["1", "1"],
}
BARE = {"families", "settings", "find", "mcp", "init"}  # take no --project


@dataclass(frozen=True)
class Case:
    pipeline: str
    name: str  # such as "queue add"
    words: tuple[str, ...]  # with {project} and so on

    @property
    def stage(self) -> str:
        """The stage whose work the command does, whose table is deleted before."""
        return {"launch": "train", "generate": "generated"}.get(self.name, self.name)


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def every_command(pipeline: str, folder: Path) -> Iterator[Case]:
    """From click's own list, with the stages and the commands of groups."""
    arguments = ("x", "--project", str(folder))
    context = click.Context(cli.cli)
    context.meta["arguments"] = arguments

    def below(name: str, command: click.Command) -> Iterator[Case]:
        required = [parameter for parameter in command.params if parameter.required]
        made = [word for each in required for word in _value(each)]
        yield Case(pipeline, name, tuple(GIVEN.get(name, made)))
        if isinstance(command, click.Group):
            for each, found in command.commands.items():
                yield from below(f"{name} {each}", found)

    names = [*cli.cli.list_commands(context), *Project(folder).stage_names]
    for name in dict.fromkeys(names):
        command = cli.cli.get_command(context, name)
        assert command
        yield from below(name, command)


def _value(parameter: click.Parameter) -> list[str]:
    value = "1" if isinstance(parameter.type, click.types.IntParamType) else "x"
    return [parameter.opts[0], value] if isinstance(parameter, click.Option) else [value]


def words_of(case: Case, folder: Path, port: int) -> list[str]:
    first, *rest = case.name.split()
    project = [] if first in BARE else ["--project", str(folder)]
    known = Project(folder)
    inputs = {"text_to_image": "picture0.png", "retrieval": "count_words"}
    values = {
        "project": folder,
        "weights": known.config.project.weights,
        "port": port,
        "input": inputs[case.pipeline],
        "last": known.stage_names[-1],
    }
    return [first, *project, *rest, *(word.format(**values) for word in case.words)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def attempt(case: Case, condition: str, folder: Path) -> Done:
    """Run one command under one condition, and say how it ended. AssertionError if it hangs."""
    port = free_port()
    words = ["bash", "-c", CONDITIONS.get(condition, 'exec "$@"'), "", sys.executable, "-m", "pipeline"]
    words += words_of(case, folder, port)
    environment = {**os.environ, "PYTHONPATH": str(projects.ROOT), "XDG_CACHE_HOME": str(folder.parent / "cache")}

    def begun(process: subprocess.Popen[Any]) -> None:
        if case.name == "view":
            threading.Thread(target=_end_page, args=(process, port)).start()

    if condition == "columns":
        code, out = projects.in_terminal(words, COLUMNS, environment, begun)
        err = ""
    else:
        pipe, home = subprocess.PIPE, projects.ROOT
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "errors": "replace"}
        with subprocess.Popen(words, cwd=home, env=environment, start_new_session=True, **options) as process:
            begun(process)
            try:
                out, err = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                raise AssertionError("hangs") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        code = process.returncode
    if case.name in ("queue start", "queue add"):
        _wait_for_jobs(folder)
    return Done(code, out, err)


def _end_page(process: subprocess.Popen[Any], port: int) -> None:
    for _ in range(SECONDS * 10):
        with socket.socket() as probe:
            if process.poll() is not None or not probe.connect_ex(("127.0.0.1", port)):
                break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)


def _wait_for_jobs(folder: Path) -> None:
    for _ in range(SECONDS * 10):
        queue = Queue(folder)
        if queue.paused or not any(job.state in ("waiting", "running") for job in queue.jobs()):
            return
        time.sleep(0.1)
    raise AssertionError("a job hangs")


def plain(text: str) -> str:
    """What equal runs say alike: numbers, units of them and folders' names differ."""
    return " ".join(re.sub(r"[-\d.,:]+( (s|min|h|k?B|[MG]B)\b)?|\b[0-9a-f]{12}\b|/\S+", "#", text).split())


def problem(case: Case, condition: str, honest: Done, done: Done) -> str:
    """What is wrong about a command's end; "" if nothing is."""
    text = done.out + done.err
    if found := next((each for each in NEVER if each in re.sub(r"\s+", " ", text) or each in "".join(text.split())), ""):
        return f"says {found!r}"
    # What is said is not seen there.
    blind = condition in ("closed 2", "full 2", "broken 2", "columns")
    if done.code == 2 and honest.code != 2:
        refusals = ("full 1", "address space", "files")
        if condition not in refusals:
            return f"ends with {done.code}"
        lines = [line for line in done.err.splitlines() if line.strip()]
        return "" if blind or (lines and lines[-1].startswith("error: ")) else f"ends with 2 and says {lines[-3:]}"
    if done.code != honest.code:
        return f"ends with {done.code} instead of {honest.code}"
    if (case.name, condition) == ("doctor", "files"):
        return "" if f"only {FILES} files may be open" in done.out else "does not say how many files may be open"
    unseen = condition in ("closed 1", "full 1", "broken 1", "columns")
    if not unseen and plain(done.out) != plain(honest.out):
        return f"answers otherwise:\n{honest.out}\n{done.out}"
    return ""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("built")
    made = {"text_to_image": life.make(place / "images" / "project", tiny_weights, images=2)}
    made["retrieval"] = place / "code" / "project"
    made["retrieval"].mkdir(parents=True)
    small.make(made["retrieval"])
    for folder in made.values():
        projects.build(folder)
        for words in (("pause",), ("add", "status")):
            assert projects.said("queue", "--project", str(folder), *words)[0] == 0
    (made["retrieval"] / "images").mkdir()
    shutil.copytree(small.write(place / "sources"), made["text_to_image"] / "code")
    return made


@pytest.fixture(scope="module")
def honest() -> dict[Case, Done]:
    """What each command does under no condition, as far as it is known."""
    return {}


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.proof("every command under an odd stream, locale or limit gives one line or the right answer", long=True)
def test_every_command_gives_one_line_or_the_right_answer(
    condition: str, built: dict[str, Path], honest: dict[Case, Done], tmp_path: Path, cases: Callable[[int, int], int]
):
    every = [case for name, folder in built.items() for case in every_command(name, folder)]
    failures = []
    for number, case in enumerate(every[: cases(0, len(every))]):
        if case not in honest:
            honest[case] = _run(case, "", built[case.pipeline], tmp_path / f"{number}-honest")
        try:
            wrong = problem(case, condition, honest[case], _run(case, condition, built[case.pipeline], tmp_path / str(number)))
        except AssertionError as error:
            wrong = str(error)
        if wrong:
            failures.append(f"{case.pipeline} {case.name}: {condition}: {wrong}")
            logging.warning(failures[-1])
    assert not failures, "\n".join(failures)


def _run(case: Case, condition: str, source: Path, place: Path) -> Done:
    """In a copy of the project in which the command has work to do."""
    folder = place / "project"
    shutil.copytree(source, folder, copy_function=shutil.copy2, symlinks=True)
    shutil.rmtree(folder / "tables" / case.stage, ignore_errors=True)
    try:
        return attempt(case, condition, folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)
