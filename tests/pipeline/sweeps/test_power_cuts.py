"""A power cut at any step of a project's life, with any part of the unsynced steps lost: nothing that was committed is."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipeline.sweeps import life
from tests.pipeline.sweeps.forks import Forks
from tests.pipeline.sweeps.replay import CUTS, Disk, read

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform != 'linux'", reason="disk.c is preloaded on Linux alone")]
CAPTIONS = ("picture number 0", "a red cup")  # of picture0, before and after an edit
USES = (
    *(("run", name, "--only") for name in life.STAGES),
    ("export",),
    ("query", "select path, width from images", "--parquet", "exports/answer.parquet"),
    ("generate", "a red cup"),
    ("clean", "--runs"),
)


def recorded(forks: Forks, folder: Path, record: Path) -> dict[str, dict[str, str]]:
    """For each caption, the digests of the results that belong to it."""
    expected, rows = {}, {}
    for number, caption in enumerate(CAPTIONS):
        forks.call("tests.pipeline.sweeps.life:write", str(folder / "images/picture0.txt"), caption, watch=folder, record=record)
        for words in USES:
            words = tuple(word.replace("answer", f"answer{number}") for word in words)
            words = tuple(str(folder / word) if word.startswith("exports/") else word for word in words)
            done = forks.call(
                "tests.pipeline.sweeps.life:command", str(folder), words, rows, caption, watch=folder, record=record
            )
            assert done.code == 0, done.text
            rows = done.noted
        copy = folder.parent / "finished" / folder.name
        shutil.copytree(folder, copy, copy_function=shutil.copy2, symlinks=True)
        expected[caption] = forks.call("tests.pipeline.sweeps.life:completed", str(copy)).value
        shutil.rmtree(copy)
    return expected


@pytest.mark.proof("after a power cut at any step, whatever unsynced steps it loses, a project ends where an unbroken one ends")
def test_a_power_cut_at_any_step_loses_nothing_that_was_committed(
    forks: Forks, tmp_path: Path, tiny_weights: Path, cases: Callable[[int, int], int], request: pytest.FixtureRequest
):
    folder, record = life.make(tmp_path / "project", tiny_weights), tmp_path / "record"
    disk = Disk(folder)
    expected = recorded(forks, folder, record)
    steps, generator = read(record), random.Random(12)
    count, kinds = cases(6, 300), Counter[str]()
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
        done = forks.call("tests.pipeline.sweeps.life:recover", str(copy), disk.marked, caption)
        found = done.value["digests"]
        named += done.value["named"]  # an unfinished commit that `verify` names and the next run makes good
        problems = done.value["problems"] + [f"{name} differs" for name in found if found[name] != expected[caption][name]]
        if problems or "Traceback" in done.text or "panicked" in done.text:
            failures.append(f"cut {number} ({kind}) after step {moment} of {len(steps)}: {problems} {done.text}")
        else:
            shutil.rmtree(copy)
    request.node.user_properties += [("of", dict(kinds)), ("steps", len(steps)), ("named", named)]
    assert not failures, "\n".join(failures)
