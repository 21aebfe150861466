"""Cleaning frees the disk space of rows that are not wanted and changes no other row."""

from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.store.index import Index
from pipeline.store.table import TableFolder
from pipeline.store.writer import Writer
from tests.pipeline.store.stores import VECTORS, check_tensors, names, numbers, state, vectors, written

RECIPE = {"stage": "vectors"}


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


def test_cleaning_keeps_the_rows_of_an_unfinished_run(tmp_path: Path):
    table = written(tmp_path / "t", *range(10))
    with Writer(table, RECIPE) as writer:
        writer.finish(names(3, *range(5, 10)), {})  # of the first shard, only row 3 is wanted
        writer.append(vectors(3, 77, add=100))
        writer.flush()
        writer.collect()
    assert table.rows()["number"].to_pylist() == [3, 5, 6, 7, 8, 9]
    check_tensors(table)
    with Writer(table, RECIPE) as writer:
        assert sorted(numbers(writer.stored)) == [3, 5, 6, 7, 8, 9, 77]
        writer.finish(names(3, *range(5, 10), 77), {})
    assert table.rows()["number"].to_pylist() == [103, 5, 6, 7, 8, 9, 177]
    check_tensors(table)


def test_a_table_that_no_run_has_finished_is_not_cleaned(tmp_path: Path):
    with Writer(TableFolder(tmp_path / "t", VECTORS), RECIPE) as writer:
        writer.append(vectors(1))
        assert writer.collect() == 0
        assert numbers(writer.stored) == [1]


def test_cleaning_killed_before_the_old_shards_are_deleted_loses_nothing(tmp_path: Path, monkeypatch):
    table = written(tmp_path / "t", *range(10))
    with Writer(table, RECIPE) as writer:
        writer.finish(names(0, 5), {})

    def die(self: Index, rows: pa.Table) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt), Writer(table, RECIPE) as writer:
        patched.setattr(Index, "replace", die)
        writer.collect()
    check_tensors(table)
    for _ in range(2):
        with Writer(table, RECIPE) as writer:
            writer.collect()
            writer.finish(names(0, 5), {})
        assert numbers(table.rows()) == [0, 5]
        check_tensors(table)
    with Writer(table, RECIPE) as writer:
        writer.collect()
    assert table.usage()["shards"] == 1
