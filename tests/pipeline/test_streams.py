"""What a person reads: standard streams that are closed, full or broken, odd locales, and text that would drive a terminal."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import tarfile

import pytest

from pipeline.errors import one_line
from pipeline.terminal import Terminal, format_table, shown, tell
from tests import projects

SAY = "import sys; from pipeline.process import open_streams; open_streams(); "
ODD = "red\x1b]0;title\x07\x1b[31m\r\x9b2J\u202etxt.exe\u2028.png"


def shell(words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = os.environ | environment | {"PY": sys.executable}
    return subprocess.run(
        ["bash", "-c", words], cwd=projects.ROOT, env=given, capture_output=True, text=True, timeout=projects.HANG
    )


@pytest.mark.parametrize("streams", ["1>&-", "0<&- 1>&- 2>&-", "1> >(true)", "2> >(true)", "2>/dev/full", "1>/dev/full"])
def test_no_command_minds_a_closed_or_broken_stream_but_an_answer_that_no_disk_takes_is_one_line(streams):
    done = shell(f'"$PY" -m pipeline families {streams}')
    if streams == "1>/dev/full":
        assert (done.returncode, done.stderr) == (2, "error: disk full; free some space and run again\n")
        return
    assert (done.returncode, done.stderr) == (0, "")
    assert "1>" in streams or "klein-base-4b" in done.stdout


def test_what_a_process_of_a_command_says_aside_may_be_lost(tmp_path):
    child, parent = tmp_path / "child.py", tmp_path / "parent.py"
    child.write_text(f"{SAY}print('said')")
    parent.write_text(
        f"{SAY}from pipeline.process import run_apart; sys.exit(run_apart([sys.executable, {str(child)!r}], quiet=True))"
    )
    assert shell(f'"$PY" "{parent}" 2>/dev/full', PYTHONPATH=str(projects.ROOT)).returncode == 0


@pytest.mark.parametrize("stream", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_no_file_gets_the_number_of_a_standard_stream(stream):
    code = f"{SAY}file = open('README.md'); sys.exit(10 * (file.fileno() > 2) + os.get_inheritable(0))"
    assert shell(f'"$PY" -c "import os; {code}" {stream}').returncode == 11


def test_a_reader_that_ends_does_not_end_what_a_command_does():
    work = "[print(n, file=f) for n in range(9999) for f in (sys.stdout, sys.stderr)]; open(sys.argv[1], 'w').write('done')"
    done = shell(f'f=$(mktemp); "$PY" -c "{SAY}{work}" $f 2> >(head -n 1 >/dev/null) | head -n 1; cat $f; rm $f')
    assert done.stdout == "0\ndone"


def test_names_of_files_and_answers_are_the_same_in_every_locale(tmp_path):
    (tmp_path / "images").mkdir()
    projects.draw(tmp_path / "images" / "käse 🧀.png", 1, (96, 96))
    (tmp_path / "project.toml").write_text("")
    folder = f'--project "{tmp_path}"'
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert "1 usable" in shell(f'"$PY" -m pipeline images {folder}', **plain).stderr
    for environment in (plain, {"PYTHONIOENCODING": "ascii"}):
        done = shell(f'"$PY" -m pipeline query "select path from images" --format csv {folder}', **environment)
        assert (done.stdout, done.stderr) == ("path\nkäse 🧀.png\n", "")


def test_nothing_that_a_file_says_reaches_the_terminal_unescaped(tmp_path, capsys):
    (tmp_path / "project.toml").write_text("")
    (tmp_path / "images").mkdir()
    with tarfile.open(tmp_path / "images" / "some.tar", "w") as tar:
        member = tarfile.TarInfo(ODD)
        member.size = 3
        tar.addfile(member, io.BytesIO(b"abc"))
    projects.draw(tmp_path / "images" / "good.png", 1, (96, 96))
    said = projects.latentmill(tmp_path, "images")
    assert r"red\x1b]0;title\x07\x1b[31m\r\x9b2J\u202etxt.exe\u2028.png (" in said
    with Terminal(ODD) as terminal:
        terminal.say(ODD)
    tell(f"{ODD} \ud83d", aside=True)
    tell(f"error: {one_line(OSError(errno.ENOENT, 'gone', ODD))}")
    said += "".join(capsys.readouterr()) + projects.latentmill(tmp_path / ODD, "status", code=2)
    said += "".join(projects.said(ODD)[1:]) + format_table(("path",), [(ODD,)])
    assert not {character for character in said if shown(character) != character}
