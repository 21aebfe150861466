"""Damage, kills, power cuts and full disks: what was committed stays, what was not is gone, and nobody sees a half."""

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.store.rows import missing
from pipeline.store.table import TableFolder
from pipeline.store.writer import Writer
from tests.pipeline.store.stores import (
    NOTES,
    VECTORS,
    check_tensors,
    lances,
    lines,
    names,
    notes,
    numbers,
    state,
    vectors,
    written,
)

RECIPE = {"stage": "vectors"}

# Damage.


def empty(path: Path) -> None:
    path.write_bytes(b"")


def test_what_killed_writers_left_half_written_is_swept(tmp_path: Path):
    table = written(tmp_path / "t", 1)
    leftovers = [
        table.folder / ".tmp-1-manifest.json",
        table.shards / ".tmp-1-x.arrow",
        table.folder / "artifacts/a/.tmp-1-x.png",
    ]
    leftovers[2].parent.mkdir(parents=True)
    for path in leftovers:
        path.write_bytes(b"half")
    with Writer(table, RECIPE):
        assert not any(path.exists() for path in leftovers)
    assert numbers(table.rows()) == [1]


def test_an_empty_newest_lance_manifest_costs_no_row_of_a_tensor_table_and_readers_do_not_notice(tmp_path: Path):
    table = written(tmp_path / "t", *range(5))
    with Writer(table, RECIPE, shard_bytes=1000) as writer:
        for number in range(5, 9):
            writer.append(vectors(number))
    empty(lances(table, "_versions/*.manifest")[0])
    assert numbers(table.rows()) == list(range(5))
    with Writer(table, RECIPE) as writer:
        assert numbers(writer.stored) == list(range(9))
        writer.finish(None, {})
    assert numbers(table.rows()) == list(range(9))
    check_tensors(table)


def test_an_empty_newest_lance_manifest_costs_rows_alone_only_the_last_commit(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, RECIPE, flush_seconds=0) as writer:
        for number in range(5):
            writer.append(notes(number))
    empty(lances(table, "_versions/*.manifest")[0])
    with Writer(table, RECIPE) as writer:
        assert writer.stored["line"].to_pylist() == [0, 1, 2, 3]
        writer.append(notes(4))
        writer.finish(None, {})
    assert lines(table) == [f"text {n}" for n in range(5)]


@pytest.mark.parametrize("pattern", ["_versions/*.manifest", "data/*", "*/*"])
def test_an_index_that_is_lost_altogether_is_rebuilt_from_the_shards(tmp_path: Path, pattern: str):
    table = written(tmp_path / "t", *range(12))
    with Writer(table, RECIPE) as writer:
        writer.append(vectors(3, 4, add=1000))  # newer than the rows of the first shard
        writer.finish(names(*range(8)), {})
    before = table.rows()
    for path in lances(table, pattern):
        empty(path)
    with pytest.raises(ValueError, match=r"rows.lance cannot be read at version \d+: .*; run the stage again") as error:
        table.rows()
    assert "\n" not in str(error.value)
    with Writer(table, RECIPE) as writer:
        assert not table.exists  # its version is gone, and another may get the number
        assert numbers(writer.stored) == [0, 1, 2, 5, 6, 7, 8, 9, 10, 11, 3, 4]
        writer.finish(names(*range(8)), {})
    assert table.rows().equals(before)
    check_tensors(table)


def test_rows_alone_that_are_lost_altogether_are_begun_again(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    for _ in range(2):
        with Writer(table, RECIPE) as writer:
            assert writer.stored.num_rows == 0
            writer.append(notes(1))
            writer.finish(None, {})
        assert lines(table) == ["text 1"]
        for path in lances(table, "_versions/*.manifest"):
            empty(path)


def test_a_damaged_old_lance_manifest_does_not_stop_a_run(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, RECIPE, flush_seconds=0) as writer:
        for number in range(5):
            writer.append(notes(number))
    empty(lances(table, "_versions/*.manifest")[3])
    with Writer(table, RECIPE) as writer:
        writer.finish(None, {})
    assert lines(table) == [f"text {n}" for n in range(5)]


HURT: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:900]),
    "without its end": lambda path: path.write_bytes(path.read_bytes()[:-1]),
}


@pytest.mark.parametrize("how", HURT)
def test_rows_of_a_lost_shard_are_missing_again_and_only_those(tmp_path: Path, how: str):
    table = written(tmp_path / "t", *range(15))
    HURT[how](sorted(table.shards.glob("*.arrow"))[1])
    with Writer(table, RECIPE) as writer:
        assert numbers(missing(names(*range(15)), writer.stored)) == [5, 6, 7, 8, 9]
        writer.append(vectors(5, 6, 7, 8, 9))
        writer.finish(names(*range(15)), {})
    assert numbers(table.rows()) == list(range(15))
    check_tensors(table)


def test_a_shard_that_the_index_never_heard_of_is_taken_in(tmp_path: Path):
    table = written(tmp_path / "t", 1, 2)
    other = written(tmp_path / "other", 2, 3)
    for path in other.shards.glob("*.arrow"):
        shutil.copy(path, table.shards / f"00000002-{path.name[9:]}")
    with Writer(table, RECIPE) as writer:
        assert sorted(numbers(writer.stored)) == [1, 2, 3]
        writer.finish(None, {})
    check_tensors(table)


def test_a_shard_whose_rows_were_all_replaced_does_not_come_back(tmp_path: Path):
    table = written(tmp_path / "t", 1, 2)
    with Writer(table, RECIPE) as writer:
        writer.append(vectors(1, 2, add=100))
        writer.finish(None, {})
    before = state(table.folder)
    with Writer(table, RECIPE) as writer:
        assert writer.stored["number"].to_pylist() == [101, 102]
        writer.finish(None, {})
    assert state(table.folder) == before
    with Writer(table, RECIPE) as writer:
        assert writer.collect() > 0
    assert table.rows()["number"].to_pylist() == [101, 102] and table.usage()["shards"] == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"rows": 1}'])
def test_a_damaged_manifest_is_said_and_mended_by_the_next_run(tmp_path: Path, content: bytes):
    table = written(tmp_path / "t", 1, 2)
    (table.folder / "manifest.json").write_bytes(content)
    assert not table.exists
    with pytest.raises(ValueError, match=r"manifest.json is damaged \(.*\); run the stage again"):
        table.rows()
    with Writer(table, RECIPE) as writer:
        assert numbers(writer.stored) == [1, 2]
        writer.finish(None, {})
    assert numbers(table.rows()) == [1, 2]


def test_a_manifest_never_comes_to_name_rows_that_were_written_after_it(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, RECIPE) as writer:
        writer.append(notes(1))
        writer.finish(None, {})
    pinned = table.manifest()["lance_version"]
    for path in lances(table, "_versions/*.manifest"):
        empty(path)
    with Writer(table, RECIPE, flush_seconds=0) as writer:
        for number in range(pinned + 2):
            writer.append(notes(number))
            assert not table.exists


# A full disk.


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The system refuses to write files beyond this size, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [100, 1200, 1300, 2500, 4500])
@pytest.mark.parametrize("schema", [NOTES, VECTORS], ids=["rows", "tensors"])
def test_a_full_disk_is_one_line_and_what_was_committed_stays(tmp_path: Path, schema, limit: int):
    make = notes if schema is NOTES else vectors
    table = TableFolder(tmp_path / "t", schema)
    with Writer(table, RECIPE) as writer:
        writer.append(make(1, 2, 3))
        writer.finish(None, {})
    before = table.rows()
    kept = r"disk full while writing \w+: \d+ rows are kept; free 1 MB or more and run again"
    with pytest.raises(ValueError, match=kept) as error, no_file_above(limit), Writer(table, RECIPE, shard_bytes=1) as writer:
        for number in range(4, 30):
            writer.append(make(number, number + 100, number + 200, number + 300, number + 400))
            writer.flush()
        writer.finish(None, {})
        writer.write_artifact("big.png", lambda path: path.write_bytes(bytes(10000)) and None)
    assert "\n" not in str(error.value)
    assert not list(table.folder.rglob(".tmp-*"))
    assert table.rows().equals(before) or table.rows().num_rows > 100
    with Writer(table, RECIPE) as writer:
        assert writer.stored.num_rows >= int(str(error.value).split(": ")[1].split()[0]) >= 3
        writer.append(make(999))
        writer.finish(None, {})
    assert table.rows().num_rows == table.manifest()["rows"] >= 4


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "disk full while writing notes: 1 rows are kept; free 1 MB or more and run again"),
        (errno.EROFS, "cannot write notes in .*: read-only file system; 1 rows are kept"),
        (errno.EACCES, "cannot write notes in .*: permission denied; 1 rows are kept"),
    ],
)
def test_what_the_disk_says_only_at_the_last_moment_is_one_line_too(tmp_path: Path, monkeypatch, number: int, said: str):
    table = TableFolder(tmp_path / "t", NOTES)

    def refuse(path: Path) -> None:
        raise OSError(number, "no")

    with pytest.raises(ValueError, match=said), Writer(table, RECIPE) as writer:
        writer.append(notes(1))
        writer.flush()
        monkeypatch.setattr("pipeline.store.disk.sync", refuse)
        writer.write_artifact("a.png", lambda path: path.write_bytes(b"x") and None)
    assert not (table.folder / "artifacts/a.png").exists()
    assert not list(table.folder.rglob(".tmp-*"))


def test_a_file_where_the_folder_should_be_is_one_line(tmp_path: Path):
    (tmp_path / "t").write_text("I was here first")
    with pytest.raises(ValueError, match="cannot write notes in"), Writer(TableFolder(tmp_path / "t" / "x", NOTES), RECIPE):
        pass


# Kills and power cuts.

# Rows are written one by one from where the table ends; what has been acknowledged is told on standard output.
WRITE = """
import sys
from pathlib import Path
from pipeline.store.rows import missing
from pipeline.store.table import TableFolder
from pipeline.store.writer import Writer
from tests.pipeline.store.stores import NOTES, VECTORS, notes, vectors
schema, make = {"notes": (NOTES, notes), "vectors": (VECTORS, vectors)}[sys.argv[2]]
with Writer(TableFolder(Path(sys.argv[1]), schema), {}, shard_bytes=3000) as writer:
    number = writer.stored.num_rows
    while True:
        writer.append(make(number))
        number += 1
        if number % 3 == 0:
            writer.flush()
        if number % 10 == 0:
            writer.finish(None, {"number": number})
        sys.stdout.write(f"{writer.stored.num_rows} {number if number % 10 == 0 else 0}\\n")
        sys.stdout.flush()
"""


def killed(folder: Path, stage_name: str, seconds: float) -> list[list[int]]:
    """Let a process write for so long after its first row, kill it, and return what it had acknowledged."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITE, str(folder), stage_name]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None and child.stderr is not None
    first = child.stdout.readline()
    time.sleep(seconds)
    child.kill()
    rest, said = child.communicate()
    assert first, said
    told = (first + rest).splitlines()
    return [[int(word) for word in line.split()] for line in told if line.count(" ") == 1 and line[-1] != " "]


@pytest.mark.parametrize(("schema", "kills"), [(NOTES, 5), (VECTORS, 8)], ids=["rows", "tensors"])
def test_a_writer_killed_at_any_moment_loses_no_acknowledged_row_and_shows_no_partial_one(tmp_path: Path, schema, kills: int):
    table, chance, rows = TableFolder(tmp_path / "t", schema), random.Random(), 0
    for _ in range(kills):
        told = killed(table.folder, schema.name, chance.random() * 0.5)
        acknowledged, finished = max(kept for kept, _ in told), max(done for _, done in told)
        assert acknowledged >= rows
        if table.exists:
            seen = table.rows()
            assert seen.num_rows % 10 == 0 and seen.num_rows >= finished
            assert seen.num_rows == table.manifest()["facts"]["number"] == table.manifest()["rows"]
            if schema.tensors:
                check_tensors(table)
        with Writer(table, {}) as writer:
            stored, rows = writer.stored, writer.stored.num_rows
        assert rows >= acknowledged
        expected = (vectors if schema.tensors else notes)(*range(rows))
        assert missing(pa.table(expected).select([f.name for f in schema.columns]), stored).num_rows == 0
    assert not list(table.folder.rglob(".tmp-*"))


def test_all_that_a_table_needs_has_reached_the_disk_when_flush_finish_and_keep_return(tmp_path: Path, monkeypatch):
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
