"""A disk that becomes full in the middle of a command, or a power cut at any step that loses any part of the unsynced steps: one
line says so, and nothing is lost that was committed.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import projects
from tests.pipeline.forks import Done, Forks
from tests.pipeline.sweeps import life
from tests.pipeline.sweeps.replay import CUTS, Disk, read

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform != 'linux'", reason="disk.c is preloaded on Linux alone")]
WRITING = [words for words in life.COMMANDS if words[0] not in ("clean", "verify")]
WRITES = [*(("run", name, "--only") for name in life.STAGES), *WRITING]
CAPTIONS = ("picture number 0", "a red cup")  # of picture0, before and after an edit
USES = (
    *(("run", name, "--only") for name in life.STAGES),
    ("export",),
    ("query", "select path, width from images", "--parquet", "exports/answer{number}.parquet"),
    ("generate", "a red cup"),
    ("clean", "--runs"),
)


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
        words, record = generator.choice(WRITES), tmp_path / "record"
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


@pytest.mark.proof("after a power cut at any step, whatever unsynced steps it loses, a project ends where an unbroken one ends")
def test_a_power_cut_at_any_step_loses_nothing_that_was_committed(
    forks: Forks,
    finished: Callable[[str], tuple[Path, dict[str, str]]],
    tmp_path: Path,
    cases: Callable[[int, int], int],
    request: pytest.FixtureRequest,
):
    sound, digests = finished("tiny")
    folder, record, rows, expected = projects.copied(sound, tmp_path / "project"), tmp_path / "record", {}, {CAPTIONS[0]: digests}
    disk = Disk(folder)
    lives = CAPTIONS if request.config.getoption("--prove") else CAPTIONS[:1]
    for number, caption in enumerate(lives):
        forks.call(life.write, folder / "images/picture0.txt", caption, watch=folder, record=record)
        for words in USES:
            words = [word.format(number=number) for word in words]
            done = forks.call(life.command, folder, words, rows, caption, watch=folder, record=record)
            assert done.code == 0, done.text
            rows = done.noted
        if caption not in expected:
            copy = shutil.copytree(folder, tmp_path / "edited" / folder.name, symlinks=True)
            expected[caption] = forks.call(life.completed, copy).value
    steps, generator = read(record), random.Random(12)
    count, kinds = cases(4, 300), Counter[str]()
    moments = sorted(generator.sample(range(1, len(steps) + 1), count))
    failures, named = [], 0
    for number, moment in enumerate(moments):
        while disk.time < moment:
            disk.apply(steps[disk.time])
        kind = CUTS[number % len(CUTS)]
        kinds[kind] += 1
        copy = tmp_path / "cut" / str(number) / folder.name
        copy.parent.mkdir(parents=True)
        disk.cut(kind, generator, copy)
        caption = disk.marked.get("caption", CAPTIONS[0])
        (copy / "images/picture0.txt").write_text(caption)
        found = forks.call(life.recover, copy, disk.marked.get("rows", {}), disk.marked.get("files", {})).value
        named += found["named"]  # an unfinished commit that `verify` names and the next run makes good
        problems = found["problems"]
        problems += [f"{name} differs" for name, digest in found["digests"].items() if digest != expected[caption][name]]
        if problems:
            failures.append(f"cut {number} ({kind}) after step {moment} of {len(steps)}: {problems}")
        else:
            shutil.rmtree(copy)
    request.node.user_properties += [("of", dict(kinds)), ("steps", len(steps)), ("named", named)]
    assert not failures, "\n".join(failures)
