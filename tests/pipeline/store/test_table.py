"""A table shows readers only what a finished run left, and a writer deletes only what it is asked to delete."""

import errno
import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

from pipeline.store.index import Index
from pipeline.store.rows import missing, newest_per_key
from pipeline.store.table import TableFolder, Writer
from schemas.table import Among
from tests.pipeline.store.stores import (
    ARTICLES,
    BATCHES,
    NOTES,
    VECTORS,
    articles,
    check_tensors,
    lance_files,
    name_of,
    names,
    notes,
    numbers,
    run,
    state,
    texts,
    vectors,
    written,
)

RECIPE = {"stage": "vectors", "config": {"size": 3}}

# What readers see.


def test_a_table_without_a_manifest_has_no_readers_and_is_not_cleaned(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, RECIPE) as writer:
        writer.append(notes(1, 2))
        writer.flush()
        assert not table.exists and writer.collect() == 0
        with pytest.raises(ValueError, match=r"there is no table notes yet: .*manifest.json is missing; run the stage first"):
            table.rows()
        assert table.usage()["rows"] == 0
        assert writer.finish(None, {}) == table.manifest()
    assert texts(table) == ["text 1", "text 2"]


def test_rows_are_read_from_the_disk_again_only_if_a_file_of_theirs_has_changed(tmp_path: Path, monkeypatch):
    table, opened, real = written(tmp_path / "t", *range(5), schema=NOTES), list[int](), lance.dataset
    monkeypatch.setattr(lance, "dataset", lambda *given, **named: (opened.append(1), real(*given, **named))[1])
    assert table.rows() == TableFolder(table.folder, NOTES).rows()
    assert len(opened) == 1
    for name in ("checksums.jsonl", *(f"rows.lance/{each}" for each in ("_versions", "data"))):
        file = table.folder / name
        file = file if file.is_file() else next(path for path in file.iterdir() if path.suffix in (".manifest", ".lance"))
        content, before = file.read_bytes(), len(opened)
        file.write_bytes(content + b"\n")
        if name != "checksums.jsonl":
            with pytest.raises(ValueError, match="bytes"):
                table.rows()
        file.write_bytes(content)
        assert table.rows().num_rows == 5 and len(opened) > before


def test_a_reader_beside_a_writer_that_finishes_many_times_always_sees_one_finished_run(tmp_path: Path):
    table = written(tmp_path / "t", 0, schema=NOTES)
    seen: list[set[str]] = []
    done, failed = threading.Event(), list[ValueError]()

    def read() -> None:
        while not done.is_set():
            try:
                seen.append({text.rpartition(" ")[0] for text in texts(TableFolder(table.folder, NOTES))})
            except ValueError as error:
                failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    with Writer(table, RECIPE) as writer:
        for turn in range(8):
            writer.append(notes(0, 1, 2, text=f"turn {turn}"))
            writer.finish(None, {})
            reads = len(seen)
            while len(seen) < reads + 2 and not failed:  # at least one began after this run had finished
                time.sleep(0.001)
    done.set()
    reader.join()
    assert not failed and all(len(runs) == 1 for runs in seen)
    assert {f"turn {turn}" for turn in range(8)} <= {run for runs in seen for run in runs}


@pytest.mark.parametrize("kind", ["notes", "vectors"])
def test_readers_get_all_columns_with_their_documentation_or_some_of_all_rows_sorted_by_key(kind: str, tmp_path: Path):
    schema, batch = BATCHES[kind]
    table = TableFolder(tmp_path / "t", schema)
    run(table, batch(4, 0, 3, 1, 5, 2))
    run(table, wanted=table.rows().slice(1).select(list(schema.key)))
    assert table.rows().schema.equals(schema.stored, check_metadata=True)
    expected = pa.table(batch(*range(1, 6))).select(list(schema.key))
    assert table.rows().select(list(schema.key)).to_pylist() == expected.to_pylist()
    assert table.rows(columns=schema.key).equals(table.rows().select(list(schema.key)))
    with Writer(table, RECIPE) as writer:
        writer.append(batch(2, 7))
    names = [schema.stored.names[-1]]
    assert table.committed(names).equals(table.committed().select(names))
    assert table.committed(names).num_rows == table.index.read_newest(names).num_rows - 1


def test_a_reader_whose_version_was_just_deleted_reads_the_newer_one(tmp_path: Path):
    table = written(tmp_path / "t", 1, 2)

    class Slow(Index):
        def read(self, version: int, columns: Sequence[str] = (), among: Among | None = None) -> pa.Table:
            late.index = table.index
            written(table.folder, 3)
            return super().read(version, columns, among)

    late = TableFolder(table.folder, VECTORS)
    late.index = Slow(table.index.path, table.index.schema)
    assert numbers(late.rows()) == [1, 2, 3]


# Finishing.


def test_rows_not_wanted_are_hidden_and_shown_again_without_being_written_and_the_same_run_again_changes_no_file(tmp_path: Path):
    table = written(tmp_path / "t", *range(10))
    shards = state(table.shards)
    for wanted in ([2, 4], list(range(10))):
        with Writer(table, RECIPE) as writer:
            manifest = writer.finish(names(*wanted), {"seconds": 1})
            assert numbers(writer.stored) == list(range(10))
        assert numbers(table.rows()) == wanted
        assert (manifest["rows"], manifest["dead"]) == (len(wanted), 10 - len(wanted))
        assert state(table.shards) == shards
        check_tensors(table)
        before = state(table.folder)
        for facts in ({}, {"seconds": 1}):
            with Writer(table, RECIPE) as writer:
                writer.finish(names(*wanted), facts)
        assert state(table.folder) == before


def _editions(table: TableFolder) -> dict[int, str]:
    rows = table.rows()
    return dict(zip(numbers(rows), rows["text"].to_pylist(), strict=True))


def test_a_run_that_changes_few_rows_of_a_table_with_long_columns_writes_no_others(tmp_path: Path, monkeypatch):
    table, expected = written(tmp_path / "t", *range(400), schema=ARTICLES), {n: f"text {n} of 1" for n in range(400)}
    whole = lance_files(table, "data/*")

    def edit(writer: Writer, edition: int, *changed: int, gone: int) -> None:
        writer.append(articles(*changed, edition=edition))
        writer.append(articles(gone, edition=edition))
        expected.update({n: f"text {n} of {edition}" for n in changed})
        expected.pop(gone)
        editions = pa.array([int(text.rpartition(" ")[2]) for text in expected.values()], pa.int32())
        writer.finish(names(*expected).append_column("edition", editions), {})
        assert writer.stored.column_names == ["name", "edition"]
        assert dict(zip(numbers(writer.stored), writer.stored["edition"].to_pylist(), strict=True)) == {
            n: int(text.rpartition(" ")[2]) for n, text in expected.items()
        }

    with Writer(table, RECIPE) as writer:
        edit(writer, 2, 3, 500, gone=4)
        edit(writer, 3, 500, 7, 8, gone=9)
    assert _editions(table) == expected
    assert {*whole} < {*lance_files(table, "data/*")} and not list(table.examine())
    some = table.rows(columns=["text"], among=("edition", pa.array([3], pa.int32())))
    assert sorted(some["text"].to_pylist()) == ["text 500 of 3", "text 7 of 3", "text 8 of 3"]
    # The process ends between the deletion and the mark.
    lance.dataset(table.index.path).delete("edition = 1")
    assert _editions(table) == expected
    with Writer(table, RECIPE) as writer:
        assert writer.stored.num_rows == len(expected)
    # Many deletions, or many files: all is written again.
    edition = 5
    for limit, low in (("FRAGMENTS", 8), ("DELETED", 1 / 40)):
        counts = []
        with monkeypatch.context() as patch:
            patch.setattr(f"pipeline.store.index.{limit}", low)
            while len(counts) < 9:
                with Writer(table, RECIPE) as writer:
                    edit(writer, edition, edition, gone=399 - edition)
                counts.append(len(lance_files(table, "data/*")))
                edition += 1
        assert 1 in counts and max(counts) > 1
    assert _editions(table) == expected


def test_a_row_is_live_only_if_it_equals_its_wanted_row_in_every_wanted_column(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    run(table, notes(1, 2, 3))
    run(table, wanted=pa.table(notes(1, 2, 3)).set_column(2, "text", pa.array(["text 1", "text 2", "other"])))
    assert texts(table) == ["text 1", "text 2"]


def test_a_table_may_be_empty(tmp_path: Path):
    for schema in (NOTES, VECTORS):
        table = TableFolder(tmp_path / schema.name, schema)
        run(table)
        assert table.exists and table.rows().num_rows == 0 and table.usage()["rows"] == 0
    table.tensors().ahead([])


def test_files_stay_few_through_many_commits_and_the_published_version_is_kept(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("pipeline.store.table.COMMITS", 4)
    table = written(tmp_path / "t", *range(7), schema=NOTES)
    most = 0
    with Writer(table, RECIPE, flush_seconds=0) as writer:
        for number in range(25):
            writer.append(notes(number, text="new"))
            most = max(most, len(lance_files(table, "*/*")))
        assert texts(table) == [f"text {n}" for n in range(7)]
        writer.finish(None, {})
    assert most < 3 * 4 + 10
    assert len(lance_files(table, "data/*")) == len(lance_files(table, "_versions/*.manifest")) == 1
    assert texts(table) == [f"new {n}" for n in range(25)]


def test_rows_appended_before_an_interrupt_in_the_middle_of_a_commit_are_kept(tmp_path: Path, monkeypatch):
    table, append = TableFolder(tmp_path / "t", VECTORS), Index.append

    def interrupted(self: Index, rows: pa.Table) -> int:
        monkeypatch.setattr(Index, "append", append)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Writer(table, RECIPE) as writer:
        writer.append(vectors(1, 2))
        monkeypatch.setattr(Index, "append", interrupted)
        writer.flush()
    assert numbers(run(table)) == [1, 2]
    check_tensors(table)


# What a writer refuses.


WRONG = {
    "in remark": lambda rows: rows.drop_columns(["remark"]),
    "in extra": lambda rows: rows.append_column("extra", pa.array([1])),
    "order of columns": lambda rows: rows.select(["number", "name", "shape", "remark", "tensor"]),
    "column number must be int32, got int64": lambda rows: rows.set_column(1, "number", pa.array([1])),
    "column name must not be null": lambda rows: rows.set_column(0, "name", pa.array([None], pa.string())),
    "tensor of 500 values": lambda rows: rows.set_column(2, "shape", pa.array([[3, 4]], pa.list_(pa.int32()))),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_batch_of_another_schema_is_refused_with_the_difference(tmp_path: Path, message: str):
    table = TableFolder(tmp_path / "t", VECTORS)
    with pytest.raises(ValueError, match=f"a batch of vectors.* {message}"), Writer(table, RECIPE) as writer:
        writer.append(vectors(1))
        writer.append(WRONG[message](vectors(2)))
    assert numbers(run(table)) == [1]  # the batch before it is kept


# Artifacts.


def test_an_artifact_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no ink")

    with Writer(table, RECIPE) as writer:
        kept = writer.write_artifact(
            "checkpoints/step-1.safetensors", lambda path: path.write_bytes(path.suffix.encode()) and None
        )
        assert kept == table.folder / "artifacts/checkpoints/step-1.safetensors" and kept.read_bytes() == b".safetensors"
        with pytest.raises(RuntimeError, match="no ink"):
            writer.write_artifact("checkpoints/step-1.safetensors", fail)
        with pytest.raises(AssertionError, match="below artifacts"):
            writer.write_artifact("../manifest.json", fail)
    assert [path.name for path in kept.parent.iterdir()] == ["step-1.safetensors"] and kept.read_bytes() == b".safetensors"


# Cleaning frees the disk space of rows that are not wanted and changes no other row.


def test_cleaning_deletes_dead_rows_and_rewrites_sparse_shards_and_changes_no_live_row(tmp_path: Path):
    table = written(tmp_path / "t", *range(20))
    with Writer(table, RECIPE) as writer:
        writer.finish(names(0, 1, 2, 3, 5, 10), {"seconds": 1})
    before, usage, old = table.rows(), table.usage(), state(table.shards)
    with Writer(table, RECIPE) as writer:
        freed = writer.collect()
        assert sorted(numbers(writer.stored)) == [0, 1, 2, 3, 5, 10]
        assert writer.collect() == 0
    after = table.usage()
    assert freed == usage["bytes"] - after["bytes"] > 10_000
    assert (after["rows"], after["dead"], after["shards"]) == (6, 0, 2)  # one shard was full enough to be kept
    assert len(state(table.shards).items() & old.items()) == 1
    assert table.rows().drop_columns(["shard", "byte_offset"]).equals(before.drop_columns(["shard", "byte_offset"]))
    assert table.manifest()["facts"] == {"seconds": 1}
    check_tensors(table)


def test_the_rows_of_an_unfinished_run_are_invisible_until_it_finishes_and_cleaning_keeps_them(tmp_path: Path):
    table = written(tmp_path / "t", *range(10))
    with Writer(table, RECIPE) as writer:
        writer.finish(names(3, *range(5, 10)), {})  # of the first shard, only row 3 is wanted
        before = table.rows()
        writer.append(vectors(3, 77, add=100))
        writer.flush()
        assert TableFolder(table.folder, VECTORS).rows().equals(before)
        writer.collect()
    assert table.rows()["number"].to_pylist() == [3, 5, 6, 7, 8, 9]
    check_tensors(table)
    assert sorted(numbers(run(table, wanted=names(3, *range(5, 10), 77)))) == [3, 5, 6, 7, 8, 9, 77]
    assert table.rows()["number"].to_pylist() == [103, 5, 6, 7, 8, 9, 177]
    check_tensors(table)


def test_cleaning_killed_before_the_old_shards_are_deleted_loses_nothing(tmp_path: Path, monkeypatch):
    table = written(tmp_path / "t", *range(10))
    run(table, wanted=names(0, 5))

    def die(self: Index, rows: pa.Table) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt), Writer(table, RECIPE) as writer:
        patched.setattr(Index, "replace", die)
        writer.collect()
    for _ in range(2):
        assert numbers(table.rows()) == [0, 5]
        check_tensors(table)
        with Writer(table, RECIPE) as writer:
            writer.finish(names(0, 5), {})
            writer.collect()
    assert table.usage()["shards"] == 1


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


# A disk that refuses to write: one line says so, and what was committed stays.


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [100, 1300, 4500])
@pytest.mark.parametrize("name", BATCHES)
def test_a_full_disk_is_one_line_and_what_was_committed_stays(tmp_path: Path, name: str, limit: int):
    schema, make = BATCHES[name]
    table = written(tmp_path / "t", 1, 2, 3, schema=schema)
    before = table.rows()
    kept = r"disk full while writing \w+: \d+ rows are kept; free 100 MB or more and run again"
    with pytest.raises(ValueError, match=kept) as error, no_file_above(limit), Writer(table, RECIPE, shard_bytes=1) as writer:
        for number in range(4, 30):
            writer.append(make(number, number + 100, number + 200, number + 300, number + 400))
            writer.flush()
        writer.finish(None, {})
        writer.write_artifact("big.png", lambda path: path.write_bytes(bytes(10000)) and None)
    assert "\n" not in str(error.value)
    assert not list(table.folder.rglob(".tmp-*"))
    assert table.rows().equals(before) or table.rows().num_rows > 100
    assert run(table, make(999)).num_rows >= int(str(error.value).split(": ")[1].split()[0]) >= 3
    assert table.rows().num_rows == table.manifest()["rows"] >= 4


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "disk full while writing notes: 1 rows are kept; free 5 GB or more"),
        (errno.EROFS, "cannot write notes in .*: read-only file system; 1 rows are kept"),
        (errno.EACCES, "cannot write notes in .*: permission denied; 1 rows are kept"),
    ],
)
def test_an_error_of_the_last_fsync_is_one_line_with_the_room_that_is_still_needed(tmp_path, monkeypatch, number, message):
    table = TableFolder(tmp_path / "t", NOTES)

    def refuse(path: Path) -> None:
        raise OSError(number, "no")

    with pytest.raises(ValueError, match=message), Writer(table, RECIPE) as writer:
        writer.append(notes(1))
        writer.flush()
        writer.expect(int(5e9))
        monkeypatch.setattr("pipeline.store.disk.sync", refuse)
        writer.write_artifact("a.png", lambda path: path.write_bytes(b"x") and None)
    assert not (table.folder / "artifacts/a.png").exists()
    assert not list(table.folder.rglob(".tmp-*"))


# Which rows are missing.


@pytest.mark.parametrize("few", [0, 500])
def test_missing_rows_differ_in_some_wanted_column_null_equals_null_and_order_is_kept(monkeypatch, few):
    monkeypatch.setattr("pipeline.store.rows.FEW", few)
    stored = pa.table({"a": [1, 2, 3, 4], "b": ["x", None, "z", None], "c": [0.5, 1.5, None, 2.5], "more": [0, 0, 0, 0]})
    wanted = pa.table({"c": [9.0, 2.5, None, 1.5, 0.5, 9.0], "a": [9, 4, 3, 2, 1, 9], "b": ["n", "other", "z", None, "x", "n"]})
    assert missing(wanted, stored)["a"].to_pylist() == [9, 4, 9]
    assert missing(wanted, stored.slice(0, 0)).equals(wanted)
    assert missing(wanted.slice(0, 0), stored).num_rows == 0


def test_missing_compares_lists_and_a_hundred_thousand_rows():
    count = 100_000
    rows = pa.table({"key": [name_of(n) for n in range(count)], "shape": pa.array(np.arange(2 * count).reshape(-1, 2).tolist())})
    stored = rows.filter(pa.array(np.arange(count) % 1000 != 7))
    assert missing(rows, stored)["key"].to_pylist() == [name_of(n) for n in range(7, count, 1000)]


@pytest.mark.parametrize("few", [0, 500])
def test_the_last_row_of_each_key_stays_in_its_place_whether_slices_or_a_copy_are_made(few, monkeypatch):
    monkeypatch.setattr("pipeline.store.rows.FEW", few)
    keys = [7, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    found = newest_per_key(pa.table({"key": keys, "number": range(11)}), ("key",))
    assert found.to_pylist() == [{"key": keys[place], "number": place} for place in (0, 3, 4, 6, 7, 8, 9, 10)]
