"""A tensor lies where the index says, of whatever type, and reading many of them needs little memory and few open files."""

import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.project.tables import Table
from pipeline.store.shards import MAPPED_SHARDS, ShardReader, write_shard
from pipeline.store.table import TableFolder, Writer
from schemas.table import STORED_AS, TableSchema, column, tensor
from tests.pipeline.store.stores import VECTORS, name_of, run, vectors


def resident(kind: str) -> int:
    """This process's memory in bytes: its own (RssAnon), or that of mapped files (RssFile)."""
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(rf"{kind}:\s+(\d+) kB", status.read_text())
        assert found
        return int(found[1]) * 1024
    return int(psutil.Process().memory_full_info().uss) if kind == "RssAnon" else 0


def test_a_shard_is_plain_arrow_in_batches_of_at_most_64_rows_and_a_tensor_lies_where_its_row_says(tmp_path: Path):
    batches = [*(vectors(number) for number in range(149)), vectors(200, words=10)]
    rows = write_shard(tmp_path, pa.Table.from_batches([batch.cast(VECTORS.batch) for batch in batches]), VECTORS)
    assert rows.schema.equals(VECTORS.stored, check_metadata=True)
    for row in rows.to_pylist():
        found = np.fromfile(tmp_path / "shards" / row["shard"], np.uint16, row["nbytes"] // 2, offset=row["byte_offset"])
        assert found.size == np.prod(row["shape"]) and np.all(found == row["number"])
    with pa.ipc.open_file(str(tmp_path / "shards" / rows["shard"][0].as_py())) as file:
        assert [file.get_batch(i).num_rows for i in range(file.num_record_batches)] == [64, 64, 22]
        assert file.schema.equals(VECTORS.shard)


def test_views_are_valid_until_the_next_ahead_and_open_files_stay_few_over_many_shards(tmp_path: Path):
    count = MAPPED_SHARDS + 30
    rows = [write_shard(tmp_path, pa.table(vectors(i, words=8)).cast(VECTORS.batch), VECTORS) for i in range(count)]
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
def test_reading_a_table_of_128_megabytes_leaves_memory_flat(tmp_path: Path):
    words = 1 << 19  # 1 MiB a row
    table = TableFolder(tmp_path / "t", VECTORS)
    with Writer(table, {}) as writer:
        for start in range(0, 128, 16):
            writer.append(vectors(*range(start, start + 16), words=words))
        writer.finish(None, {})
    reader = table.tensors()
    order = [name_of(i) for i in np.random.default_rng(7).permutation(128)]
    own, mapped, files = [], [], resident("RssFile")
    for at in range(0, 128, 4):
        reader.ahead(order[at : at + 4])
        for name in order[at : at + 4]:
            assert int(reader.read(name).max()) == int(name.removeprefix("row-"))
        own.append(resident("RssAnon"))
        mapped.append(resident("RssFile") - files)
    assert max(own[8:]) - min(own[8:]) < 16 << 20
    assert sys.platform != "linux" or max(mapped) < 64 << 20  # read pages are released; elsewhere that is only a hint


# Tensors of every dtype, one or several to a row, through everything that the store does with them.


SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=3)


def schema_of(dtypes: list[str]) -> TableSchema:
    """A table with one tensor of each of these dtypes, called t0, t1, ..."""
    shapes = [column(f"t{place}_shape", pa.list_(pa.int32()), "shape") for place in range(len(dtypes))]
    columns = (column("name", pa.string(), "the key"), *shapes)
    tensors = tuple(tensor(f"t{place}", dtype, "values") for place, dtype in enumerate(dtypes))
    return TableSchema(name="drawn", doc="Any tensors.", key=("name",), columns=columns, tensors=tensors)


def row_of(schema: TableSchema, number: int, shapes: list[list[int]]) -> dict[str, Any]:
    """A row whose tensors have these shapes and random bytes as values."""
    row: dict[str, Any] = {"name": f"row {number}"}
    generator = np.random.default_rng(number)
    for each, shape in zip(schema.tensors, shapes, strict=True):
        kind = pa.nulls(0, each.kind).to_numpy(zero_copy_only=False).dtype
        values = generator.integers(0, 256, math.prod(shape) * kind.itemsize, dtype=np.uint8).view(kind)
        row |= {each.shape: shape, each.name: np.nan_to_num(values) if kind.kind == "f" else values}
    return row


def read_all(table: TableFolder) -> dict[str, dict[str, Any]]:
    """Every tensor that readers see, by the row's key and the tensor's name; None for a tensor without values."""
    reader, found = table.tensors(), dict[str, dict[str, Any]]()
    for row in table.rows().to_pylist():
        sizes = {each.name: row[each.nbytes] for each in table.schema.tensors}
        found[row["name"]] = {name: reader.read(row["name"], name).copy() if size else None for name, size in sizes.items()}
    return found


def check(found: dict[str, dict[str, Any]], rows: list[dict[str, Any]], schema: TableSchema) -> None:
    assert found.keys() == {row["name"] for row in rows}
    for row in rows:
        for each in schema.tensors:
            values = found[row["name"]][each.name]
            assert (values is None) == (len(row[each.name]) == 0)
            if values is not None:
                assert values.dtype == row[each.name].dtype and list(values.shape) == row[each.shape]
                assert values.tobytes() == row[each.name].tobytes()


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(data=st.data(), dtypes=st.lists(st.sampled_from(sorted(STORED_AS)), min_size=1, max_size=3))
def test_what_is_appended_is_read_back_after_commit_repair_and_cleaning(tmp_path_factory, data, dtypes):
    schema, folder = schema_of(dtypes), tmp_path_factory.mktemp("drawn")
    shapes = data.draw(st.lists(st.tuples(*[SHAPES] * len(dtypes)), min_size=1, max_size=12))
    rows = [row_of(schema, number, list(each)) for number, each in enumerate(shapes)]
    table = TableFolder(folder, schema)
    limit = data.draw(st.integers(1, 300))
    with Writer(table, {}, shard_bytes=limit) as writer:
        while rows[writer.stored.num_rows :]:
            start = writer.stored.num_rows
            batch = rows[start : start + data.draw(st.integers(1, 5))]
            writer.append(schema.record_batch(batch))
            writer.flush()
        writer.finish(None, {})
    check(read_all(table), rows, schema)
    shutil.rmtree(table.index.path)
    wanted = rows[:: data.draw(st.integers(1, 3))]
    with Writer(table, {}, shard_bytes=limit) as writer:
        writer.finish(pa.table({"name": [row["name"] for row in wanted]}), {})
        writer.collect()
    check(read_all(table), wanted, schema)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_python_api_shows_16_bit_words_as_the_floats_that_they_are(tmp_path: Path, dtype: str):
    schema = schema_of([dtype])
    row = row_of(schema, 0, [[2, 3]])
    table = TableFolder(tmp_path / "t", schema)
    run(table, schema.record_batch([row]))
    values = Table(table)["row 0"]
    assert (values.dtype.name, values.shape, values.tobytes()) == (dtype, (2, 3), row["t0"].tobytes())
