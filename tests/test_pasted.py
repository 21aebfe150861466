"""Commands of README and pages, pasted into bash and zsh: both understand them alike, and make and latentmill accept them."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from pipeline import cli
from tests import projects

NAMED = ("code", "sql", "stages", "python", "speed", "pictures", "weights", "subjects", "editing", "trainers", "developing")
PAGES = (projects.ROOT / "README.md", *(projects.ROOT / "data" / "docs" / f"{name}.md" for name in NAMED))
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
SHELLS = {"bash": ("bash", "--norc", "-i"), "zsh": ("zsh", "-f", "-i")}  # interactive: zsh reads # there as a word
FILLED = {"...": "x", "STEP": "5", "STAGE": "train", "FILE": "out", "FOLDER": "out"}  # what a person writes instead
NAMES = ("git", "make", "latentmill", "cd")
MARK = "pasted"
VARIABLES = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


def commands() -> Iterator[str]:
    """The lines of blocks without a language, commands in single backticks, and queries after make."""
    language = None
    for line in TEXT.splitlines():
        if line.startswith("```"):
            language = line[3:] if language is None else None
        elif language == "" and line.strip():
            yield line
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    yield from re.findall(r"`((?:make|latentmill) [^`]+)`", prose)
    for sql in re.findall(r"```sql\n(.*?)\n```", TEXT, re.DOTALL):
        yield f'make query SQL="{sql}"'


COMMANDS = tuple(dict.fromkeys(commands()))


@functools.cache
def pasted(shell: str) -> dict[str, list[list[str]]]:
    """What an interactive shell makes of every command: command -> the words of each program that it would start."""
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}: apt install {shell}")
    assert all(text.split()[0] in NAMES for text in COMMANDS), "any other command would really run"
    lines = [f'{name}() {{ printf "%s\\0" {MARK} {name} "$@" {MARK}; }}' for name in NAMES]
    for number, text in enumerate(COMMANDS):
        lines += [f'printf "%s\\0" {MARK}{number}', text]
    done = subprocess.run(
        SHELLS[shell],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=projects.HANG,
        env=VARIABLES | {"PS1": ""},
    )
    found: dict[str, list[list[str]]] = {}
    for number, part in enumerate(re.split(rf"{MARK}\d+\0", done.stdout)[1:]):
        found[COMMANDS[number]] = [each.split("\0")[1:-2] for each in re.findall(rf"{MARK}\0.*?{MARK}\0", part, re.DOTALL)]
    return found


def home(words: list[str]) -> list[str]:
    """The words with ~ as the home folder: bash replaces it after =, zsh leaves that to the program."""
    return [re.sub(r"(^|=)~/", rf"\1{Path.home()}/", word) for word in words]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_of_the_readme_pasted_into_a_shell_gives_the_words_that_are_meant(shell, text):
    expected, words = [], []
    for word in shlex.split(text):
        if word == "&&":
            expected.append(words)
            words = []
        else:
            words.append(word)
    assert [home(found) for found in pasted(shell)[text]] == [home(found) for found in [*expected, words]]


@pytest.mark.parametrize("text", [text for text in COMMANDS if text.startswith("make ")])
def test_make_accepts_every_command_of_the_readme(text):
    words = ["make", "-n", "-o", ".venv/ready", *shlex.split(text.replace("=...", "=x"))[1:]]
    done = subprocess.run(words, cwd=projects.ROOT, env=VARIABLES, capture_output=True, text=True, timeout=projects.HANG)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", [text for text in COMMANDS if text.startswith("latentmill ")])
def test_latentmill_accepts_every_command_of_the_readme(text, tmp_path, monkeypatch):
    (tmp_path / "project.toml").write_text('[project]\nfamily = "micro"\n')
    (tmp_path / "data").symlink_to(projects.ROOT / "data")
    (tmp_path / "src" / "project").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)  # a command opens its project while click reads the options
    name, *words = [FILLED.get(word, word).replace("~", str(tmp_path)) for word in shlex.split(text)[1:]]
    command = cli.cli.get_command(click.Context(cli.cli), name)
    assert command is not None, f"there is no command {name}"
    command.make_context(name, words)
