"""`latentmill find` in folders of source code without a project."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline import runner
from pipeline.commands.retrieval.find import command
from stages.retrieval import sources

# No file has a docstring or a comment; one is in the middle of an edit.
CODE = {
    "read.go": "package a\n\nfunc ReadConfig(path string) []byte {\n\tfile, err := Open(path)\n\treturn ReadAll(file)\n}\n",
    "sum.rs": "fn sum_prices(items: &[Item]) -> u32 {\n    let mut n = 0;\n    for i in items { n += i.price; }\n    n\n}\n",
    "list.c": "struct node *reverse_list(struct node *head) {\n  node *before = 0;\n  while (head) swap(&head, &before);\n}\n",
    "Mail.kt": "fun sendMail(address: String, text: String) {\n    val server = connect(address)\n    server.deliver(text)\n}\n",
    "draw.swift": "func drawCircle(radius: Double) {\n    let path = Path(radius)\n    path.stroke()\n}\n",
    "backup.sh": 'backup() {\n  tar czf "$1.tar.gz" "$1"\n  scp "$1.tar.gz" host:\n}\n',
    "broken.py": "def parse_date(text):\n    day, month = text.split(\n\ndef parse_time(text):\n    return text.split(':')\n",
}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of a folder of code and of the cache of what was read of it. No test here changes it."""
    place = tmp_path_factory.mktemp("read")
    (place / "code").mkdir()
    for name, text in CODE.items():
        (place / "code" / name).write_text(text)
    return place


@pytest.fixture
def code(read: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(read / "cache"))
    monkeypatch.chdir(read)
    return read / "code"


@pytest.fixture
def folder(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the code that was not read yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(code, tmp_path / "code"))


def find(*words: str) -> tuple[list[str], str]:
    """The paths of the answers, best first, and what was said besides."""
    done = CliRunner().invoke(command, [*words, "--json"], catch_exceptions=False)
    return [each["path"] for each in json.loads(done.stdout)["results"]], done.stderr


def test_code_in_seven_languages_without_a_docstring_is_found_where_it_stands(code):
    asked = {
        "read a configuration file": "read.go",
        "add up the prices": "sum.rs",
        "reverse a linked list": "list.c",
        "send an email": "Mail.kt",
        "draw a circle": "draw.swift",
        "copy a tar archive to the host": "backup.sh",
        "parse a date": "broken.py",
    }
    assert {query: find(query, "code")[0][0] for query in asked} == {query: f"code/{name}" for query, name in asked.items()}


def test_every_answer_is_of_the_files_as_they_are_now(folder):
    said = find("send an email", "code")[1].splitlines()
    (kept,) = (folder.parent / "cache" / "latentmill" / "find").iterdir()
    assert said[0] == f"{folder} is read for the first time. What is read is kept in {kept}; delete that folder to forget it."
    assert "of 7 files to encode: about " in said[1] and " texts/s of " in said[1]
    assert said[-1].startswith("read: 7 files read") and "changed" not in "".join(said)
    assert find("send an email", "code")[1] == ""  # nothing has changed
    (folder / "Mail.kt").rename(folder / "Post.kt")
    (folder / "draw.swift").unlink()
    (folder / "web.py").write_text("def download_page(url):\n    answer = get(url)\n    return answer.text\n")
    paths, said = find("send an email", "code", "--limit", "99")
    assert (
        paths[0] == "code/Post.kt"
        and not {"code/Mail.kt", "code/draw.swift"} & set(paths)
        and "changed: 2 files read, 2 gone, 3 texts" in said
    )
    paths, said = find("download a page", "code", "--path", "*.py", "--threshold", "0")
    assert (paths[0], set(paths), said) == ("code/web.py", {"code/web.py", "code/broken.py"}, "")
    (folder / "note.py").write_text('def f(a):\n    """Water the flowers in the garden."""\n    b = a.x\n    return b + 1\n')
    assert find("watering flowers", "code")[0][0] == "code/note.py", "by its docstring, which shares no word with its code"


def test_an_edit_is_no_file_gone_and_what_cannot_be_read_or_a_killed_search_left_is_in_a_later_answer(folder, monkeypatch):
    find("send an email", "code")
    (folder / "web.py").write_text("def download_page(url):\n    answer = get(url)\n    return answer.text\n")
    (folder / "link.py").symlink_to("nowhere.py")
    said = find("download a page", "code")[1]
    assert "1 file read, 1 cannot be read (code/link.py), " in said and "gone" not in said
    (folder / "link.py").unlink()
    (folder / "locked.py").write_text("def paint_fence(fence):\n    fence.coats += 1\n    return fence\n")
    read, access = sources.read_bytes, os.access

    def refused(path: Path, most: int) -> bytes:
        if path.name == "locked.py":
            raise ValueError(f"{path} cannot be read: Permission denied")
        return read(path, most)

    monkeypatch.setattr(sources, "read_bytes", refused)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked.py" and access(path, mode))
    assert "1 cannot be read (code/locked.py), 1 gone" in find("paint a fence", "code")[1]
    assert find("paint a fence", "code")[1] == ""
    monkeypatch.setattr(sources, "read_bytes", read)
    monkeypatch.setattr(os, "access", access)
    assert find("paint a fence", "code")[0][0] == "code/locked.py"
    # What a killed search had begun to take up.
    (folder / "bird.py").write_text(
        "def count_birds(birds):\n    found = [bird for bird in birds if bird.flies]\n    return len(found)\n"
    )
    run = runner.run

    def killed(project, name, console):
        if name == "units":
            raise RuntimeError
        return run(project, name, console)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(runner, "run", killed)
        find("how many birds", "code")
    assert find("how many birds", "code")[0][0] == "code/bird.py"


def test_a_regular_expression_and_several_paths_limit_the_answers_and_nonsense_finds_nothing(code):
    assert find("send an email", "code", "--regex", r"^def \w+_time", "--threshold", "0")[0] == ["code/broken.py"]
    paths = find("send an email", "code", "--path", "*.kt", "--path", "*.go", "--threshold", "0")[0]
    assert set(paths) == {"code/Mail.kt", "code/read.go"}
    for query in ("purple elephants dance over the moon", "qwzx vbnmt plork"):
        done = CliRunner().invoke(command, [query, "code"], catch_exceptions=False, standalone_mode=False)
        assert (done.stdout, done.return_value) == ("nothing found\n", 1)
