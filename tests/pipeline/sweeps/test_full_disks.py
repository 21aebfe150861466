"""A disk that becomes full in the middle of a command: one line says so, and nothing is lost once there is room again."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import projects
from tests.pipeline.sweeps import life
from tests.pipeline.sweeps.forks import Done, Forks
from tests.pipeline.sweeps.replay import read

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform != 'linux'", reason="disk.c is preloaded on Linux alone")]
WRITING = [words for words in life.COMMANDS if words[0] not in ("clean", "verify")]
USES = [*(("run", name, "--only") for name in life.STAGES), *WRITING]


@pytest.mark.proof("a disk that is full in the middle of a command is one line, and nothing is lost once there is room")
def test_a_disk_that_is_full_at_any_byte_is_one_line_and_loses_nothing(
    forks: Forks,
    finished: Callable[[str], tuple[Path, dict[str, str]]],
    tmp_path: Path,
    cases: Callable[[int, int], int],
    request: pytest.FixtureRequest,
):
    sound, expected = finished("tiny")
    folder, generator, refused = projects.duplicate(sound, tmp_path / "project"), random.Random(12), Counter[str]()

    def write(words: tuple[str, ...], **limit: Path | int) -> Done:
        if words[0] == "run":
            shutil.rmtree(folder / "tables" / words[1])
        shutil.rmtree(folder / "exports", ignore_errors=True)
        (folder / "exports").mkdir()
        return forks.call(life.command, folder, words, {}, watch=folder, **limit)

    wanted = cases(2, 60)
    while refused.total() < wanted:
        words, record = generator.choice(USES), tmp_path / "record"
        done = write(words, record=record)
        assert done.code == 0, done.text
        bytes_written = sum(len(step.data) for step in read(record) if step.kind == "W")
        record.unlink()
        room = generator.randrange(bytes_written or 1)
        done = write(words, room=room)
        case = f"{words}, {room} of {bytes_written} bytes: {done.code}\n{done.text}"
        if done.code:
            said = [line for line in done.text.splitlines() if line.startswith("error: ")]
            assert len(said) == 1 and "disk full" in said[0], case
            refused[words[1] if words[0] == "run" else words[0]] += 1
            assert not list((folder / "exports").iterdir()), f"half a file is left: {case}"
        found = forks.call(life.recover, folder, done.noted).value
        assert found == {"problems": [], "named": False, "digests": expected}, case
    request.node.user_properties.append(("of", dict(refused)))
