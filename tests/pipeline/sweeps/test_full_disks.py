"""A disk that becomes full in the middle of a command: one line says so, and nothing is lost once there is room again."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipeline.sweeps import life
from tests.pipeline.sweeps.forks import Forks
from tests.pipeline.sweeps.replay import read

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform != 'linux'", reason="disk.c is preloaded on Linux alone")]
USES = (
    *(("run", name, "--only") for name in life.STAGES),
    ("export",),
    ("export", "--merged"),
    ("publish",),
    ("resize", "--rank", "1"),
    ("report",),
    ("captions", "--edit", "exports/captions.csv"),
    ("query", "select path, width from images", "--csv", "exports/answer.csv"),
    ("generate", "a red cup"),
)


@pytest.mark.proof("a disk that is full in the middle of a command is one line, and nothing is lost once there is room")
def test_a_disk_that_is_full_at_any_byte_is_one_line_and_loses_nothing(
    forks: Forks, tmp_path: Path, tiny_weights: Path, cases: Callable[[int, int], int], request: pytest.FixtureRequest
):
    folder, generator, refused = life.make(tmp_path / "project", tiny_weights), random.Random(12), Counter[str]()
    (folder / "exports").mkdir()
    expected = forks.call("tests.pipeline.sweeps.life:completed", str(folder)).value
    wanted = cases(2, 60)
    while refused.total() < wanted:
        words = generator.choice(USES)
        if words[0] == "run":
            shutil.rmtree(folder / "tables" / words[1])
        shutil.rmtree(folder / "exports", ignore_errors=True)
        (folder / "exports").mkdir()
        bytes_written = _write(forks, folder, words, tmp_path / "record")
        if words[0] == "run":
            shutil.rmtree(folder / "tables" / words[1])
        shutil.rmtree(folder / "exports")
        (folder / "exports").mkdir()
        room = generator.randrange(bytes_written or 1)
        done = forks.call("tests.pipeline.sweeps.life:command", str(folder), _full(folder, words), {}, watch=folder, room=room)
        case = f"{words}, {room} of {bytes_written} bytes: {done.code}\n{done.text}"
        assert "Traceback" not in done.text and "panicked" not in done.text, case
        if done.code:
            said = [line for line in done.text.splitlines() if line.startswith("error: ")]
            assert len(said) == 1 and "disk full" in said[0], case
            refused[words[1] if words[0] == "run" else words[0]] += 1
            assert not list((folder / "exports").iterdir()), f"half a file is left: {case}"
        assert forks.call("tests.pipeline.sweeps.life:lost", str(folder), done.noted).value == [], case
        assert forks.call("tests.pipeline.sweeps.life:damaged", str(folder)).value == [], case
        assert forks.call("tests.pipeline.sweeps.life:completed", str(folder)).value == expected, case
        forks.call("tests.pipeline.sweeps.life:command", str(folder), ("clean", "--runs"), {})
        assert forks.call("tests.pipeline.sweeps.life:leftovers", str(folder)).value == [], case
    request.node.user_properties.append(("of", dict(refused)))


def _full(folder: Path, words: tuple[str, ...]) -> list[str]:
    return [str(folder / word) if word.startswith("exports/") else word for word in words]


def _write(forks: Forks, folder: Path, words: tuple[str, ...], record: Path) -> int:
    """How many bytes it wrote."""
    done = forks.call("tests.pipeline.sweeps.life:command", str(folder), _full(folder, words), {}, watch=folder, record=record)
    assert done.code == 0, done.text
    written = sum(len(step.data) for step in read(record) if step.kind == "W")
    record.unlink()
    return written
