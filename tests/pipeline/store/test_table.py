"""A table shows readers only what a finished run left, and a writer deletes only what it is asked to delete."""

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.store.index import Index
from pipeline.store.table import TableFolder
from pipeline.store.writer import COMMITS, Writer
from tests.pipeline.store.stores import (
    NOTES,
    VECTORS,
    check_tensors,
    lance_files,
    names,
    notes,
    numbers,
    state,
    texts,
    vectors,
    written,
)

RECIPE = {"stage": "vectors", "config": {"size": 3}}

# What readers see.


def test_a_table_without_a_manifest_has_no_readers(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, RECIPE) as writer:
        writer.append(notes(1, 2))
        writer.flush()
        assert not table.exists
        with pytest.raises(ValueError, match=r"there is no table notes yet: .*manifest.json is missing; run the stage first"):
            table.rows()
        assert table.usage()["rows"] == 0
        assert writer.finish(None, {}) == table.manifest()
    assert texts(table) == ["text 1", "text 2"]


def test_a_run_in_progress_is_invisible_until_it_finishes(tmp_path: Path):
    table = written(tmp_path / "t", *range(5))
    before = table.rows()
    with Writer(table, RECIPE, shard_bytes=2000) as writer:
        for number in range(3, 12):
            writer.append(vectors(number, add=100))
        writer.flush()
        assert TableFolder(table.folder, VECTORS).rows().equals(before)
        check_tensors(table)
        assert writer.stored.num_rows == 12
        writer.finish(None, {})
    assert numbers(table.rows()) == list(range(12))
    assert table.rows()["number"].to_pylist() == [0, 1, 2, *range(103, 112)]
    check_tensors(table)


def test_readers_get_rows_sorted_by_key_with_the_documentation_of_every_column(tmp_path: Path):
    table = written(tmp_path / "t", 7, 3, 5, 1)
    assert table.rows().schema.equals(VECTORS.stored, check_metadata=True)
    assert numbers(table.rows()) == [1, 3, 5, 7]


def test_a_row_whose_key_exists_is_replaced(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, RECIPE) as writer:
        writer.append(notes(1, 2, 3))
        writer.append(notes(2, text="again"))
        writer.flush()
        writer.append(notes(3, text="later"))
        writer.flush()
        assert writer.stored["text"].to_pylist() == ["text 1", "again 2", "later 3"]
        writer.finish(None, {})
    assert texts(table) == ["text 1", "again 2", "later 3"]


def test_a_writer_counts_the_rows_that_it_wrote_itself_by_key(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, RECIPE) as writer:
        assert writer.rows_written == 0
        writer.append(notes(1, 2, 3))
        writer.flush()
        writer.append(notes(2, text="again"))
        writer.flush()
        assert writer.rows_written == 3
        writer.finish(None, {})
        assert writer.rows_written == 3
    with Writer(table, RECIPE) as writer:
        writer.append(notes(3, 4))
        writer.flush()
        assert writer.rows_written == 2


def test_a_reader_beside_a_writer_that_finishes_many_times_always_sees_one_finished_run(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, RECIPE) as writer:
        writer.append(notes(0))
        writer.finish(None, {})
    seen: set[frozenset[str]] = set()
    done, failed = threading.Event(), list[ValueError]()

    def read() -> None:
        while not done.is_set():
            try:
                seen.add(frozenset(texts(TableFolder(table.folder, NOTES))))
            except ValueError as error:
                failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    with Writer(table, RECIPE) as writer:
        for turn in range(25):
            writer.append(notes(0, 1, 2, text=f"turn {turn}"))
            writer.finish(None, {})
    done.set()
    reader.join()
    assert len(seen) > 2 and not failed
    assert all(len({text.rpartition(" ")[0] for text in rows}) == 1 for rows in seen)


def test_a_reader_whose_version_was_just_deleted_reads_the_newer_one(tmp_path: Path):
    table = written(tmp_path / "t", 1, 2)

    class Slow(Index):
        def read(self, version: int) -> pa.Table:
            late.index = table.index
            written(table.folder, 3)
            return super().read(version)

    late = TableFolder(table.folder, VECTORS)
    late.index = Slow(table.index.path, table.index.schema)
    assert numbers(late.rows()) == [1, 2, 3]


# Finishing.


def test_rows_not_wanted_are_hidden_and_shown_again_without_being_written(tmp_path: Path):
    table = written(tmp_path / "t", *range(10))
    shards = state(table.shards)
    for wanted in ([2, 4], list(range(10))):
        with Writer(table, RECIPE) as writer:
            manifest = writer.finish(names(*wanted), {})
            assert numbers(writer.stored) == list(range(10))
        assert numbers(table.rows()) == wanted
        assert (manifest["rows"], manifest["dead"]) == (len(wanted), 10 - len(wanted))
        assert state(table.shards) == shards
        check_tensors(table)


def test_a_table_without_tensors_deletes_rows_that_are_not_wanted(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, RECIPE) as writer:
        writer.append(notes(*range(10)))
        manifest = writer.finish(pa.table(notes(3, 4)).select(["page", "line", "remark"]), {})
        assert (manifest["rows"], manifest["dead"]) == (2, 0)
        assert writer.stored.num_rows == 2
    assert texts(table) == ["text 3", "text 4"]


def test_a_row_is_live_only_if_it_equals_its_wanted_row_in_every_wanted_column(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, RECIPE) as writer:
        writer.append(notes(1, 2, 3))
        writer.finish(pa.table(notes(1, 2, 3)).set_column(2, "text", pa.array(["text 1", "text 2", "other"])), {})
    assert texts(table) == ["text 1", "text 2"]


def test_a_run_that_changes_no_row_changes_no_file(tmp_path: Path):
    table = written(tmp_path / "t", *range(10))
    with Writer(table, {"stage": "vectors"}) as writer:
        writer.finish(names(*range(9)), {"seconds": 2.5, "versions": {"mlx": "1"}})
    before = state(table.folder)
    for facts in ({}, {"seconds": 2.5}):
        with Writer(table, {"stage": "vectors"}) as writer:
            writer.finish(names(*range(9)), facts)
    assert state(table.folder) == before


def test_the_manifest_says_what_the_table_is(tmp_path: Path):
    table = TableFolder(tmp_path / "t", VECTORS)
    with Writer(table, RECIPE) as writer:
        writer.append(vectors(*range(4)))
        writer.finish(names(1, 2, 3), {"seconds": 2.5})
        writer.finish(names(1, 2, 3), {"note": "ä"})
    manifest = table.manifest()
    assert (manifest["table"], manifest["recipe"], manifest["rows"], manifest["dead"]) == ("vectors", RECIPE, 3, 1)
    assert manifest["facts"] == {"seconds": 2.5, "note": "ä"}
    usage = table.usage()
    assert (usage["rows"], usage["dead"], usage["shards"]) == (3, 1, 1)
    assert (
        usage["shard_bytes"]
        < manifest["bytes"]
        < usage["bytes"]
        == sum(size for size, _ in state(table.folder).values()) + (table.folder / "lock").stat().st_size
    )


def test_a_table_may_be_empty(tmp_path: Path):
    for schema in (NOTES, VECTORS):
        table = TableFolder(tmp_path / schema.name, schema)
        with Writer(table, RECIPE) as writer:
            writer.finish(None, {})
        assert table.exists and table.rows().num_rows == 0 and table.usage()["rows"] == 0
    table.tensors().ahead([])


@pytest.mark.slow
def test_files_stay_few_through_200_commits_and_the_published_version_is_kept(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, RECIPE) as writer:
        writer.append(notes(*range(7)))
        writer.finish(None, {})
    most = 0
    with Writer(table, RECIPE, flush_seconds=0) as writer:
        for number in range(200):
            writer.append(notes(number, text="new"))
            most = max(most, len(lance_files(table, "*/*")))
        assert texts(table) == [f"text {n}" for n in range(7)]
        writer.finish(None, {})
    assert most < 3 * COMMITS + 10
    assert len(lance_files(table, "data/*")) == len(lance_files(table, "_versions/*.manifest")) == 1
    assert texts(table) == [f"new {n}" for n in range(200)]


def test_rows_appended_before_an_interrupt_in_the_middle_of_a_commit_are_kept(tmp_path: Path, monkeypatch):
    table, append = TableFolder(tmp_path / "t", VECTORS), Index.append

    def interrupted(self: Index, rows: pa.Table) -> int:
        monkeypatch.setattr(Index, "append", append)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Writer(table, RECIPE) as writer:
        writer.append(vectors(1, 2))
        monkeypatch.setattr(Index, "append", interrupted)
        writer.flush()
    with Writer(table, RECIPE) as writer:
        assert numbers(writer.stored) == [1, 2]
        writer.finish(None, {})
    check_tensors(table)


# What a writer refuses.


def test_a_second_writer_is_refused_and_the_first_goes_on(tmp_path: Path):
    table = written(tmp_path / "t", 1)
    with Writer(table, RECIPE) as writer:
        with pytest.raises(ValueError, match=r"is being written by process \d+"), Writer(table, RECIPE):
            pass
        writer.append(vectors(2))
        writer.finish(None, {})
    assert numbers(table.rows()) == [1, 2]


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
    with Writer(table, RECIPE) as writer:
        assert numbers(writer.stored) == [1]  # the batch before it is kept


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
