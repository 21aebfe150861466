"""A writer repairs damaged files when it opens a table: rows that can be read are kept, the others are missing again."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.store.rows import missing
from pipeline.store.table import TableFolder
from pipeline.store.verify import examine
from pipeline.store.writer import Writer
from tests.pipeline.store.stores import (
    NOTES,
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

RECIPE = {"stage": "vectors"}


def empty(path: Path) -> None:
    path.write_bytes(b"")


def test_temporary_files_of_killed_writers_are_deleted(tmp_path: Path):
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


def test_a_temporary_folder_that_is_named_like_a_shard_is_no_shard(tmp_path: Path):
    table = written(tmp_path / "t", 1)
    (table.shards / ".tmp-1-00000009-x.arrow").mkdir()
    assert list(examine(table)) == [] and table.usage()["shards"] == 1
    with Writer(table, RECIPE) as writer:
        writer.append(vectors(2))
    assert numbers(table.committed()) == [1, 2]


def test_an_empty_newest_lance_manifest_loses_no_row_of_a_tensor_table_and_readers_see_no_change(tmp_path: Path):
    table = written(tmp_path / "t", *range(5))
    with Writer(table, RECIPE, shard_bytes=1000) as writer:
        for number in range(5, 9):
            writer.append(vectors(number))
    empty(lance_files(table, "_versions/*.manifest")[0])
    assert numbers(table.rows()) == list(range(5))
    with Writer(table, RECIPE) as writer:
        assert numbers(writer.stored) == list(range(9))
        writer.finish(None, {})
    assert numbers(table.rows()) == list(range(9))
    check_tensors(table)


def test_an_empty_newest_lance_manifest_loses_only_the_last_commit_of_a_table_without_tensors(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, RECIPE, flush_seconds=0) as writer:
        for number in range(5):
            writer.append(notes(number))
    empty(lance_files(table, "_versions/*.manifest")[0])
    with Writer(table, RECIPE) as writer:
        assert writer.stored["line"].to_pylist() == [0, 1, 2, 3]
        writer.append(notes(4))
        writer.finish(None, {})
    assert texts(table) == [f"text {n}" for n in range(5)]


@pytest.mark.parametrize("pattern", ["_versions/*.manifest", "data/*", "*/*"])
def test_an_index_that_cannot_be_read_at_all_is_rebuilt_from_the_shards(tmp_path: Path, pattern: str):
    table = written(tmp_path / "t", *range(12))
    with Writer(table, RECIPE) as writer:
        writer.append(vectors(3, 4, add=1000))  # newer than the rows of the first shard
        writer.finish(names(*range(8)), {})
    before = table.rows()
    for path in lance_files(table, pattern):
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


def test_a_table_without_tensors_that_cannot_be_read_at_all_starts_empty(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    for _ in range(2):
        with Writer(table, RECIPE) as writer:
            assert writer.stored.num_rows == 0
            writer.append(notes(1))
            writer.finish(None, {})
        assert texts(table) == ["text 1"]
        for path in lance_files(table, "_versions/*.manifest"):
            empty(path)


def test_a_damaged_old_lance_manifest_does_not_stop_a_run(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, RECIPE, flush_seconds=0) as writer:
        for number in range(5):
            writer.append(notes(number))
    empty(lance_files(table, "_versions/*.manifest")[3])
    with Writer(table, RECIPE) as writer:
        writer.finish(None, {})
    assert texts(table) == [f"text {n}" for n in range(5)]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:900]),
    "without its end": lambda path: path.write_bytes(path.read_bytes()[:-1]),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_rows_of_a_lost_shard_are_missing_again_and_only_those(tmp_path: Path, kind: str):
    table = written(tmp_path / "t", *range(15))
    DAMAGE[kind](sorted(table.shards.glob("*.arrow"))[1])
    with Writer(table, RECIPE) as writer:
        assert numbers(missing(names(*range(15)), writer.stored)) == [5, 6, 7, 8, 9]
        writer.append(vectors(5, 6, 7, 8, 9))
        writer.finish(names(*range(15)), {})
    assert numbers(table.rows()) == list(range(15))
    check_tensors(table)


def test_the_rows_of_a_shard_that_the_index_does_not_name_are_added(tmp_path: Path):
    table = written(tmp_path / "t", 1, 2)
    other = written(tmp_path / "other", 2, 3)
    for path in other.shards.glob("*.arrow"):
        shutil.copy(path, table.shards / f"00000002-{path.name[9:]}")
    with Writer(table, RECIPE) as writer:
        assert sorted(numbers(writer.stored)) == [1, 2, 3]
        writer.finish(None, {})
    check_tensors(table)


def test_rows_of_an_older_shard_do_not_replace_newer_ones(tmp_path: Path):
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
def test_a_damaged_manifest_is_reported_and_rewritten_by_the_next_run(tmp_path: Path, content: bytes):
    table = written(tmp_path / "t", 1, 2)
    (table.folder / "manifest.json").write_bytes(content)
    assert not table.exists
    with pytest.raises(ValueError, match=r"manifest.json is damaged \(.*\); run the stage again"):
        table.rows()
    with Writer(table, RECIPE) as writer:
        assert numbers(writer.stored) == [1, 2]
        writer.finish(None, {})
    assert numbers(table.rows()) == [1, 2]


def test_a_manifest_never_names_rows_that_were_written_after_it(tmp_path: Path):
    table = TableFolder(tmp_path / "t", NOTES)
    with Writer(table, RECIPE) as writer:
        writer.append(notes(1))
        writer.finish(None, {})
    pinned = table.manifest()["lance_version"]
    for path in lance_files(table, "_versions/*.manifest"):
        empty(path)
    with Writer(table, RECIPE, flush_seconds=0) as writer:
        for number in range(pinned + 2):
            writer.append(notes(number))
            assert not table.exists
