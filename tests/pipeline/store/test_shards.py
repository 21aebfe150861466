"""Shards: a tensor lies where the index says, and reading many of them needs little memory and few open files."""

import re
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import psutil
import pyarrow as pa
import pytest

from pipeline.store.reader import MAPPED_SHARDS, ShardReader
from pipeline.store.shards import read_shard_index, write_shard
from pipeline.store.table import TableFolder
from pipeline.store.writer import Writer
from tests.pipeline.store.stores import VECTORS, check_tensors, name_of, numbers, vectors, written

EMPTY = [{"name": "none", "number": 0, "shape": [], "remark": "broken image", "tensor": []}]


def write(folder: Path, *batches: pa.RecordBatch) -> pa.Table:
    return write_shard(folder, 1, pa.Table.from_batches([batch.cast(VECTORS.batch) for batch in batches]), VECTORS)


def resident(kind: str) -> int:
    """This process's memory in bytes: its own (RssAnon), or that of mapped files (RssFile)."""
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(rf"{kind}:\s+(\d+) kB", status.read_text())
        assert found
        return int(found[1]) * 1024
    return int(psutil.Process().memory_full_info().uss) if kind == "RssAnon" else 0


def test_a_tensor_lies_in_the_file_where_its_row_says(tmp_path: Path):
    rows = write(tmp_path, vectors(*range(100)), vectors(200, words=10))
    assert rows.schema.equals(VECTORS.stored, check_metadata=True)
    for row in rows.to_pylist():
        found = np.fromfile(tmp_path / row["shard"], np.uint16, row["nbytes"] // 2, offset=row["byte_offset"])
        assert found.size == np.prod(row["shape"]) and np.all(found == row["number"])


def test_the_index_of_a_shard_is_rebuilt_from_the_shard_alone(tmp_path: Path):
    rows = write(tmp_path, vectors(*range(70)), pa.RecordBatch.from_pylist(EMPTY, schema=VECTORS.batch), vectors(80, words=4))
    assert read_shard_index(tmp_path / rows["shard"][0].as_py(), VECTORS).equals(rows)


def test_a_shard_is_plain_arrow_in_batches_of_at_most_64_rows(tmp_path: Path):
    rows = write(tmp_path, *(vectors(number) for number in range(150)))
    with pa.ipc.open_file(str(tmp_path / rows["shard"][0].as_py())) as file:
        assert [file.get_batch(i).num_rows for i in range(file.num_record_batches)] == [64, 64, 22]
        assert file.schema.equals(VECTORS.shard)


def test_a_shard_has_a_limited_size_and_a_larger_row_gets_a_shard_of_its_own(tmp_path: Path):
    table = TableFolder(tmp_path / "t", VECTORS)
    with Writer(table, {}, shard_bytes=5000) as writer:
        writer.append(vectors(*range(23)))  # 23,000 bytes at once
        writer.append(vectors(50, words=5000))
        writer.finish(None, {})
    counts = {row["values"]: row["counts"] for row in table.rows()["shard"].value_counts().to_pylist()}
    assert sorted(counts.values()) == [1, 3, 5, 5, 5, 5]
    check_tensors(table)


def test_a_file_that_is_not_a_shard_of_the_table_is_named(tmp_path: Path):
    with pa.ipc.new_file(str(tmp_path / "00000001-x.arrow"), pa.schema([("a", pa.int8())])) as out:
        out.write_table(pa.table({"a": pa.array([1], pa.int8())}))
    with pytest.raises(ValueError, match=r"00000001-x.arrow is not a shard of vectors: its columns are a; remove the file"):
        read_shard_index(tmp_path / "00000001-x.arrow", VECTORS)


def test_mlx_takes_a_tensor_in_one_copy_of_the_view(tmp_path: Path):
    reader = written(tmp_path / "t", 3, 4).tensors()
    view = reader.read(name_of(4))
    assert view.base is not None and not view.flags.writeable
    assert mx.array(view).view(mx.bfloat16).shape == (2, 250)
    assert np.array_equal(np.array(mx.array(view)), view)


@pytest.mark.parametrize(("damage", "message"), [(lambda p: p.unlink(), "is missing"), (lambda p: cut(p, 900), "is cut short")])
def test_readers_hide_the_rows_of_a_lost_shard_and_a_reader_of_these_rows_says_so_in_one_line(tmp_path: Path, damage, message):
    table = written(tmp_path / "t", *range(10))
    rows = table.rows()
    damage(sorted(table.shards.glob("*.arrow"))[1])
    with pytest.raises(ValueError, match=rf"vectors: .*00000002-\w+.arrow {message}.*latentmill verify --repair") as error:
        ShardReader(table.folder, rows, VECTORS)
    assert "\n" not in str(error.value)
    assert numbers(table.rows()) == numbers(table.committed()) == list(range(5))
    check_tensors(table)


def test_a_shard_that_lost_only_its_end_is_cut_short_too(tmp_path: Path):
    table = written(tmp_path / "t", *range(5))
    path = next(table.shards.glob("*.arrow"))
    cut(path, path.stat().st_size - 1)
    assert table.rows().num_rows == 0


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def test_a_row_without_a_tensor_says_so_when_it_is_read(tmp_path: Path):
    table = TableFolder(tmp_path / "t", VECTORS)
    with Writer(table, {}) as writer:
        writer.append(pa.RecordBatch.from_pylist(EMPTY, schema=VECTORS.batch))
        writer.append(vectors(1))
        writer.finish(None, {})
    reader = table.tensors()
    reader.ahead(["none", name_of(1)])
    with pytest.raises(ValueError, match="row none has no tensor"):
        reader.read("none")
    assert np.all(reader.read(name_of(1)) == 1)
    with pytest.raises(KeyError):
        reader.read("stranger")


def test_views_are_valid_until_the_next_ahead_and_open_files_stay_few_over_many_shards(tmp_path: Path):
    count = MAPPED_SHARDS + 30
    rows = [write_shard(tmp_path / "shards", i, pa.table(vectors(i, words=8)).cast(VECTORS.batch), VECTORS) for i in range(count)]
    before = psutil.Process().num_fds()
    reader = ShardReader(tmp_path, pa.concat_tables(rows), VECTORS)
    views = [reader.read(name_of(i)) for i in range(count)]
    assert all(np.all(view == i) for i, view in enumerate(views))
    views.clear()
    reader.ahead(name_of(i) for i in range(count))
    assert psutil.Process().num_fds() - before <= MAPPED_SHARDS
    del reader
    assert psutil.Process().num_fds() == before


@pytest.mark.slow
def test_reading_a_table_of_256_megabytes_leaves_memory_flat(tmp_path: Path):
    words = 1 << 19  # 1 MiB a row
    with Writer(TableFolder(tmp_path / "t", VECTORS), {}) as writer:
        for start in range(0, 256, 16):
            writer.append(vectors(*range(start, start + 16), words=words))
        writer.finish(None, {})
    reader = TableFolder(tmp_path / "t", VECTORS).tensors()
    order = [name_of(i) for i in np.random.default_rng(7).permutation(256)]
    own, mapped, files = [], [], resident("RssFile")
    for at in range(0, 256, 4):
        reader.ahead(order[at : at + 4])
        for name in order[at : at + 4]:
            assert int(reader.read(name).max()) == int(name.removeprefix("row-"))
        own.append(resident("RssAnon"))
        mapped.append(resident("RssFile") - files)
    assert max(own[8:]) - min(own[8:]) < 16 << 20
    assert sys.platform != "linux" or max(mapped) < 64 << 20  # read pages are released; elsewhere that is only a hint
