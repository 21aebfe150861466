"""A writer of one table, and a project that lives through edits, runs, exports and cleans, are killed again and again: nothing
is lost.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.store.rows import missing
from pipeline.store.table import TableFolder, Writer
from tests import projects
from tests.pipeline.forks import KILLED, Done, Forks
from tests.pipeline.store.stores import BATCHES, add, check_tensors
from tests.pipeline.sweeps import life

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform != 'linux'", reason="disk.c is preloaded on Linux alone")]
ROUNDS = {"tiny": 10, "flux3-tiny": 1, "z-image-tiny": 1}  # of 100 kills each
EDITS = {  # what is edited -> how
    "caption": lambda folder, on: (folder / "images/picture0.txt").write_text("a red cup" if on else "picture number 0"),
    "image": lambda folder, on: [_move(folder, f"picture2.{kind}", on) for kind in ("png", "txt")],
    "setting": lambda folder, on: _replace(folder / "project.toml", "rank = 2", "rank = 3", on),
}
State = tuple[bool, ...]


def _move(folder: Path, name: str, away: bool) -> None:
    here, there = folder / "images" / name, folder / name
    source, target = (here, there) if away else (there, here)
    if source.exists():
        source.rename(target)


def _replace(file: Path, old: str, new: str, on: bool) -> None:
    text = file.read_text().replace(new, old)
    file.write_text(text.replace(old, new) if on else text)


class Life:
    """Edited and used while its processes are killed; for each state of the edits, a reference is built without a kill."""

    def __init__(self, forks: Forks, place: Path, weights: Path, family: str, seed: int) -> None:
        self.forks, self.folder = forks, life.make(place / "project", weights, family=family)
        self.reference = projects.copied(self.folder, place / "unbroken" / "project")
        self.generator = random.Random(seed)
        self.expected: dict[State, dict[str, str]] = {}
        self.steps: dict[str, int] = {}  # of a command, the last time that it ran to its end
        self.committed: life.Acknowledged = {}
        self.kills: Counter[str] = Counter()

    def run(self, words: tuple[str, ...], kill: int = 0) -> Done:
        done = self.forks.call(life.command, self.folder, words, self.committed, watch=self.folder, kill=kill)
        assert done.code in (KILLED, 0), f"{words}: {done.text}"
        self.committed = done.noted
        if done.code == 0:
            self.steps[" ".join(words)] = done.steps
        return done

    def killed(self, words: tuple[str, ...]) -> bool:
        known = self.steps.get(" ".join(words), 15)
        if self.run(words, self.generator.randint(1, max(known, 2))).code == 0:
            return False
        self.kills[" ".join(words)] += 1
        assert self.forks.call(life.lost, self.folder, self.committed).value == []
        use = self.generator.random()
        if use < 0.15:
            self.run(("clean",))
            assert life.temporary(self.folder) == []
        elif use < 0.3:
            assert self.forks.call(life.damaged, self.folder).value == []
        return True

    def export(self, words: tuple[str, ...]) -> None:
        """The files that a kill leaves below exports/ are complete, and the command can be run again."""
        exports = self.folder / "exports"
        shutil.rmtree(exports, ignore_errors=True)
        exports.mkdir()
        if not self.killed(words):
            return
        left = _files(exports)
        shutil.rmtree(exports)
        exports.mkdir()
        self.run(words)
        found = _files(exports)
        assert left.keys() <= found.keys(), (words, sorted(left), sorted(found))
        assert [name for name in left if left[name] != found[name] and not name.endswith(".html")] == [], words

    def unbroken(self, state: State) -> dict[str, str]:
        if state not in self.expected:
            shutil.rmtree(self.reference / "tables", ignore_errors=True)
            self.edit(self.reference, state)
            self.expected[state] = self.forks.call(life.completed, self.reference).value
        return self.expected[state]

    def edit(self, folder: Path, state: State) -> None:
        for change, on in zip(EDITS.values(), state, strict=True):
            change(folder, on)

    def turn(self, kills: int) -> None:
        """At most `kills` kills, two thirds of them in stages, then a comparison with one that was never killed."""
        state, before = tuple(self.generator.random() < 0.5 for _ in EDITS), self.kills.total()
        self.edit(self.folder, state)
        doomed = self.generator.sample(life.STAGES, min(kills // 2, len(life.STAGES)))
        for name in life.STAGES:
            if self.generator.random() < 0.3:
                shutil.rmtree(self.folder / "tables" / name, ignore_errors=True)
                self.committed = {each: rows for each, rows in self.committed.items() if not each.startswith(f"{name}/")}
            for _ in range(self.generator.choice((1, 1, 2, 3)) if name in doomed else 0):
                if self.kills.total() >= before + 2 * kills // 3 or not self.killed(("run", name, "--only")):
                    break
            self.run(("run", name, "--only"))
        for words in self.generator.sample(life.COMMANDS, 6):
            if self.kills.total() < before + kills:
                self.export(words)
        found = self.forks.call(life.recover, self.folder, self.committed).value
        assert (found["problems"], found["digests"]) == ([], self.unbroken(state))
        self.committed = {}  # rows that are no longer wanted are deleted


def _files(folder: Path) -> dict[str, bytes]:
    names = {path: str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for path, name in names.items() if not name.startswith(".tmp-")}


@pytest.mark.proof(
    "a project whose processes are killed again and again ends where an unbroken one ends, with nothing lost or left"
)
def test_a_life_of_edits_runs_exports_and_cleans_under_kills_loses_nothing(
    family_name: str,
    seed: int,
    forks: Forks,
    tmp_path: Path,
    seeded_weights: Callable[[str], Path],
    cases: Callable[[int, int], int],
    request: pytest.FixtureRequest,
):
    kills, lived = cases(5, 100), Life(forks, tmp_path, seeded_weights(family_name), family_name, seed)
    while lived.kills.total() < kills:
        lived.turn(min(25, kills - lived.kills.total()))
    request.node.user_properties.append(("of", dict(lived.kills.most_common())))


@pytest.mark.proof("a killed writer loses no committed row and shows no part of a run")
@pytest.mark.parametrize("name", BATCHES)
def test_a_killed_writer_loses_no_committed_row_and_shows_no_part_of_a_run(
    name: str, forks: Forks, tmp_path: Path, cases: Callable[[int, int], int]
):
    schema, make = BATCHES[name]
    table, generator, rows, kills = TableFolder(tmp_path / "t", schema), random.Random(name), 0, 0
    wanted = cases(3, 80)
    while kills < wanted:
        done = forks.call(add, table.folder, name, 40, watch=table.folder, kill=generator.randint(1, 400))
        kills += done.code == KILLED
        committed, finished = done.noted or (0, 0)
        if table.exists:
            seen = table.rows()
            assert seen.num_rows % 10 == 0 and seen.num_rows >= finished
            assert seen.num_rows == table.manifest()["facts"]["number"] == table.manifest()["rows"]
            if schema.tensors:
                check_tensors(table)
        with Writer(table, {}) as writer:
            stored = writer.stored
        assert stored.num_rows >= max(committed, rows)
        rows = stored.num_rows
        if rows:
            expected = pa.table(make(*range(rows))).select([name for name in schema.short if name in schema.batch.names])
            assert missing(expected, stored).num_rows == 0
    assert rows and not list(table.folder.rglob(".tmp-*"))
