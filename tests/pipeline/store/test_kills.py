"""Kills and power cuts: no committed row is lost, and no reader sees half of a run."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.store.rows import missing
from pipeline.store.table import TableFolder, Writer
from tests.pipeline.killing import ROOT, run_and_kill
from tests.pipeline.store.stores import BATCHES, VECTORS, check_tensors, names, vectors

STORES = "tests.pipeline.store.stores"
ROWS = 40  # that a process would add if it were not killed


def before_a_sync(table: TableFolder, number: int) -> str:
    return run_and_kill(number, STORES, str(table.folder), table.schema.name, str(ROWS))[1]


def after_a_line(table: TableFolder, number: int) -> str:
    """Add rows in a process that is killed from outside once it has said `number` lines: anywhere, also inside Lance."""
    words = [sys.executable, "-m", "tests.pipeline.killing", "0", STORES, str(table.folder), table.schema.name, str(ROWS)]
    child = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(number)]
    child.kill()
    return "".join(lines) + child.communicate()[0]


def acknowledged(text: str) -> tuple[int, int]:
    """Rows committed and rows of finished runs, by the last complete line that a process said; (0, 0) without a line."""
    lines = [line.split() for line in text.split("\n")[:-1] if line and line[0].isdigit()]
    return (int(lines[-1][0]), max(int(finished) for _, finished in lines)) if lines else (0, 0)


@pytest.mark.slow
@pytest.mark.proof("a killed writer loses no committed row and shows no part of a run")
@pytest.mark.parametrize("kill", [before_a_sync, after_a_line])
@pytest.mark.parametrize("name", BATCHES)
def test_a_killed_writer_loses_no_committed_row_and_shows_no_part_of_a_run(tmp_path: Path, name: str, kill, cases):
    schema, make = BATCHES[name]
    table, generator, rows = TableFolder(tmp_path / "t", schema), random.Random(name), 0
    for _ in range(cases(2, 40)):
        committed, finished = acknowledged(kill(table, generator.randint(1, 60 if kill is before_a_sync else ROWS)))
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


def test_all_that_a_table_needs_has_reached_the_disk_when_flush_finish_and_write_artifact_return(tmp_path: Path, monkeypatch):
    synced: dict[int, tuple[int, int]] = {}  # by inode: size and time of change when it was last synced
    sync = os.fsync

    def record(handle: int) -> None:
        sync(handle)
        found = os.fstat(handle)
        synced[found.st_ino] = (found.st_size, found.st_mtime_ns)

    def check() -> None:
        for path in [table.folder, *table.folder.rglob("*")]:
            found = path.stat()
            assert path.name == "lock" or synced[found.st_ino] == (found.st_size, found.st_mtime_ns), path

    monkeypatch.delattr("fcntl.F_FULLFSYNC", raising=False)
    monkeypatch.setattr("os.fsync", record)
    table = TableFolder(tmp_path / "a" / "t", VECTORS)
    with Writer(table, {}, shard_bytes=3000) as writer:
        for turn in range(3):
            writer.append(vectors(*range(10 * turn, 10 * turn + 10)))
            writer.flush()
            check()
            writer.write_artifact(f"steps/{turn}.png", lambda path: path.write_bytes(b"picture") and None)
            check()
            writer.finish(names(*range(5 * turn, 10 * turn + 10)), {})
            check()
        writer.collect()
        check()
