"""A power cut at any step of a project's life, with any part of the unsynced steps lost: nothing that was committed is."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import projects
from tests.pipeline.sweeps import life
from tests.pipeline.sweeps.forks import Forks
from tests.pipeline.sweeps.replay import CUTS, Disk, read

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform != 'linux'", reason="disk.c is preloaded on Linux alone")]
CAPTIONS = ("picture number 0", "a red cup")  # of picture0, before and after an edit
USES = (
    *(("run", name, "--only") for name in life.STAGES),
    ("export",),
    ("query", "select path, width from images", "--parquet", "exports/answer{number}.parquet"),
    ("generate", "a red cup"),
    ("clean", "--runs"),
)


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
