"""`find` and the server for coding agents are killed while they take up edits: no answer after it is stale, wrong or cut."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.store import table
from tests.pipeline.forks import KILLED, note

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform != 'linux'", reason="disk.c is preloaded on Linux alone")]
QUERY = "how many birds are counted"
WAYS = ("find", "serve", "ask")
LIMIT = 100  # of answers: more than there are functions
BIRDS = ("herons", "owls", "swifts", "wrens", "larks", "terns")
CODE = "{gap}def count_{bird}_{edit}(values):\n    birds = [value for value in values if value.{bird}]\n    return len(birds)\n"
Found = list[list[Any]]  # of each function: file, first line, name, first line of its text


def _found(answers: list[dict[str, Any]]) -> Found:
    rows = ([Path(one["path"]).name, one["first_line"], one["qualified_name"], one["snippet"].split("\n")[0]] for one in answers)
    return sorted(rows)


def find(root: str) -> Found:
    from pipeline.commands.retrieval.find import CodeFolder, as_dict, plain

    with CodeFolder(Path(root)).current() as code:
        return _found([as_dict(plain(answer)) for answer in code.search(QUERY, LIMIT, threshold=0)])


def serve(root: str) -> Found:
    """As an agent asks: the tool `search` of `latentmill mcp`."""
    from pipeline.commands.retrieval.mcp import make_server

    answer = asyncio.run(make_server([Path(root)]).call_tool("search", {"query": QUERY, "limit": LIMIT, "threshold": 0}))
    return _found([json.loads(part.text) for part in answer.content])


def ask(root: str) -> Found:
    """As `find` asks a process of `latentmill mcp` that is up."""
    from pipeline.commands.retrieval import resident
    from pipeline.commands.retrieval.find import as_dict, kept
    from pipeline.commands.retrieval.mcp import make_server

    resident.TURN = resident.ANSWER = 600.0  # however busy the machine is
    question = {"query": QUERY, "mode": "hybrid", "limit": LIMIT, "patterns": [], "regex": "", "threshold": 0.0}
    server = make_server([Path(root)])

    async def main() -> dict[str, Any] | None:
        async with server.settings.lifespan(server):
            return await asyncio.to_thread(resident.ask, kept(Path(root)), question)

    reply = asyncio.run(main())
    assert reply, "the server must answer"
    return _found([as_dict(row) for row in reply["answers"]])


def searched(way: str, root: str) -> Found:
    os.environ["XDG_CACHE_HOME"] = str(Path(root).with_name("cache"))
    table.REVISED = 1.0  # so few functions would all be written again
    found: Found = {"find": find, "serve": serve, "ask": ask}[way](root)
    note(found)
    return found


class Folder:
    """A folder of source code that is edited, and what a search of it must find."""

    def __init__(self, root: Path, draws: random.Random) -> None:
        self.root, self.draws, self.edits = root, draws, 0
        self.expected: dict[str, list[Any]] = {}
        root.mkdir()
        for bird in BIRDS:
            self.write(bird)

    def write(self, bird: str) -> None:
        self.edits += 1
        gap = self.draws.randint(0, 5)
        (self.root / f"{bird}.py").write_text(CODE.format(gap="\n" * gap, bird=bird, edit=self.edits))
        name = f"count_{bird}_{self.edits}"
        self.expected[bird] = [f"{bird}.py", gap + 1, name, f"def {name}(values):"]

    def edit(self) -> None:
        for bird in self.draws.sample(BIRDS, self.draws.choice([1, 1, 1, 3])):
            if self.draws.random() < 0.2 and len(self.expected) > 2 and bird in self.expected:
                (self.root / f"{bird}.py").unlink()
                del self.expected[bird]
            else:
                self.write(bird)

    @property
    def answer(self) -> Found:
        return sorted(self.expected.values())


@pytest.mark.proof("find and mcp are killed while they take up edits, and every answer is complete and of the files as they are")
def test_after_a_kill_every_answer_is_of_the_files_as_they_are(forks, tmp_path, cases):
    cache = tmp_path / "cache"
    cache.mkdir()
    draws = random.Random(0)
    folder, killed, count = Folder(tmp_path / "code", draws), 0, cases(2, 200)
    first = forks.call(searched, "find", folder.root, watch=cache)
    assert first.value == folder.answer
    folder.edit()
    refreshed = forks.call(searched, "serve", folder.root, watch=cache)
    assert refreshed.value == folder.answer
    while killed < count:
        anew = draws.random() < 0.05
        if anew:
            shutil.rmtree(cache)
            cache.mkdir()
        # A kill may follow a kill before anything else is asked.
        for _ in range(draws.choice([1, 1, 2, 3])):
            folder.edit()
            step = draws.randint(1, (first if anew else refreshed).steps)
            done = forks.call(searched, draws.choice(WAYS), folder.root, watch=cache, kill=step)
            killed += done.code == KILLED
            assert (done.noted if done.code == KILLED else done.value) in (None, folder.answer)
        for way in draws.sample(WAYS, 2):
            done = forks.call(searched, way, folder.root)
            assert done.value == folder.answer, f"after {killed} kills, the last before step {step}: {done.text}"
