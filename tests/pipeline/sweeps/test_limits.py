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
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from pipeline import cli
from pipeline.project.project import Project
from pipeline.queue import Queue
from tests import projects
from tests.pipeline.forks import NEVER
from tests.pipeline.sweeps import life
from tests.stages.retrieval import project as small

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform != 'linux'", reason="/dev/full, and limits of address space")]

FILES = 64
COLUMNS = 20
SECONDS = 120  # after which a command counts as hanging
ALSO_NEVER = ("terminate called", "Exception ignored", "core dumped")
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


class Case(NamedTuple):
    pipeline: str
    name: str  # such as "queue add"
    words: tuple[str, ...]  # with {project} and so on

    @property
    def stage(self) -> str:
        """The stage whose work the command does, whose table is deleted before."""
        return {"launch": "train", "generate": "generated"}.get(self.name, self.name)


class Done(NamedTuple):
    code: int
    out: str
    err: str


def every_command(pipeline: str, folder: Path) -> Iterator[Case]:
    """From click's own list, with the stages and the commands of groups."""
    context = click.Context(cli.cli)
    context.meta["arguments"] = ("x", "--project", str(folder))

    def below(name: str, command: click.Command) -> Iterator[Case]:
        made = [word for each in command.params if each.required for word in _value(each)]
        yield Case(pipeline, name, tuple(GIVEN.get(name, made)))
        for each, found in command.commands.items() if isinstance(command, click.Group) else ():
            yield from below(f"{name} {each}", found)

    for name in dict.fromkeys([*cli.cli.list_commands(context), *Project(folder).stage_names]):
        command = cli.cli.get_command(context, name)
        assert command
        yield from below(name, command)


def _value(parameter: click.Parameter) -> list[str]:
    value = "1" if isinstance(parameter.type, click.types.IntParamType) else "x"
    return [parameter.opts[0], value] if isinstance(parameter, click.Option) else [value]


def words_of(case: Case, folder: Path, port: int) -> list[str]:
    first, *rest = case.name.split()
    project, known = [] if first in BARE else ["--project", str(folder)], Project(folder)
    values = {
        "project": folder,
        "weights": known.config.project.weights,
        "port": port,
        "input": {"text_to_image": "picture0.png", "retrieval": "count_words"}[case.pipeline],
        "last": known.stage_names[-1],
    }
    return [first, *project, *rest, *(word.format(**values) for word in case.words)]


def attempt(case: Case, condition: str, folder: Path) -> Done:
    """Run one command under one condition, and say how it ended. AssertionError if it hangs."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    words = ["bash", "-c", CONDITIONS.get(condition, 'exec "$@"'), "", sys.executable, "-m", "pipeline"]
    words += words_of(case, folder, port)
    environment = {**os.environ, "PYTHONPATH": str(projects.ROOT), "XDG_CACHE_HOME": str(folder.parent / "cache")}

    def begun(process: subprocess.Popen[Any]) -> None:
        if case.name == "view":
            threading.Thread(target=_end_page, args=(process, port)).start()

    if condition == "columns":
        done = Done(*projects.in_terminal(words, COLUMNS, environment, begun), "")
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
        done = Done(process.returncode, out, err)
    if case.name in ("queue start", "queue add"):
        _wait_until(lambda: Queue(folder).paused or not any(job.state in ("waiting", "running") for job in Queue(folder).jobs()))
    return done


def _wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(SECONDS * 10):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("a job or the page hangs")


def _end_page(process: subprocess.Popen[Any], port: int) -> None:
    def answers() -> bool:
        with socket.socket() as probe:
            return process.poll() is not None or not probe.connect_ex(("127.0.0.1", port))

    _wait_until(answers)
    process.send_signal(signal.SIGINT)


def plain(text: str) -> str:
    """What equal runs say alike: numbers, units of them and folders' names differ."""
    return " ".join(re.sub(r"[-\d.,:]+( (s|min|h|k?B|[MG]B)\b)?|\b[0-9a-f]{12}\b|/\S+", "#", text).split())


def problem(case: Case, condition: str, honest: Done, done: Done) -> str:
    """What is wrong about a command's end; "" if nothing is."""
    text = done.out + done.err
    seen = (re.sub(r"\s+", " ", text), "".join(text.split()))  # a narrow terminal breaks lines
    if found := [each for each in (*NEVER, *ALSO_NEVER) if any(each in form for form in seen)]:
        return f"says {found}"
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


HONEST: dict[Case, Done] = {}  # what each command does under no condition, as far as it is known


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.proof("every command under an odd stream, locale or limit gives one line or the right answer", long=True)
def test_every_command_gives_one_line_or_the_right_answer(
    condition: str, built: dict[str, Path], tmp_path: Path, cases: Callable[[int, int], int]
):
    every = [case for name, folder in built.items() for case in every_command(name, folder)]
    failures = []
    for number, case in enumerate(every[: cases(0, len(every))]):
        if case not in HONEST:
            HONEST[case] = _run(case, "", built[case.pipeline], tmp_path / f"{number}-honest")
        try:
            wrong = problem(case, condition, HONEST[case], _run(case, condition, built[case.pipeline], tmp_path / str(number)))
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
