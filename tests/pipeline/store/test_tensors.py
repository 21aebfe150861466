"""Tensors of every dtype, one or several to a row, through everything that the store does with them."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.project.tables import Table
from pipeline.store.table import TableFolder
from pipeline.store.writer import Writer
from schemas.table import STORED_AS, TableSchema, column, tensor
from tests.pipeline.store.stores import PAIRS, check_tensors, lance_files, names, numbers, pairs, written

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
        kind = np.dtype(each.kind.to_pandas_dtype())
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
                assert values.dtype == each.kind.to_pandas_dtype() and list(values.shape) == row[each.shape]
                assert values.tobytes() == row[each.name].tobytes()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
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
            writer.append(schema.table(batch).combine_chunks().to_batches()[0])
            writer.flush()
        writer.finish(None, {})
    check(read_all(table), rows, schema)
    shutil.rmtree(table.index.path)
    wanted = rows[:: data.draw(st.integers(1, 3))]
    with Writer(table, {}, shard_bytes=limit) as writer:
        writer.finish(pa.table({"name": [row["name"] for row in wanted]}), {})
        writer.collect()
    check(read_all(table), wanted, schema)


def test_a_row_with_two_tensors_names_both_and_neither_overlaps(tmp_path: Path):
    table = written(tmp_path / "t", *range(7), schema=PAIRS, shard_bytes=1500)
    check_tensors(table)
    rows = table.rows().to_pylist()
    assert [row["ids_nbytes"] for row in rows] == [4 * (100 + n % 3) for n in range(7)]
    assert [row["signs_nbytes"] for row in rows] == [3 * (100 + n % 3) for n in range(7)]
    for row in rows:
        ends = sorted((row[f"{name}_offset"], row[f"{name}_offset"] + row[f"{name}_nbytes"]) for name in ("ids", "signs"))
        assert ends[0][1] <= ends[1][0]


def test_a_shard_is_full_by_all_tensors_of_its_rows_together(tmp_path: Path):
    table = TableFolder(tmp_path / "t", PAIRS)
    with Writer(table, {}, shard_bytes=2200) as writer:  # a row has 700 to 714 bytes
        writer.append(pairs(*range(9)))
        writer.finish(None, {})
    assert sorted(row["counts"] for row in table.rows()["shard"].value_counts().to_pylist()) == [3, 3, 3]
    check_tensors(table)


def test_an_index_of_rows_with_two_tensors_is_rebuilt_from_its_shards(tmp_path: Path):
    table = written(tmp_path / "t", *range(9), schema=PAIRS, shard_bytes=2200)
    before = table.rows()
    for path in lance_files(table, "*/*"):
        path.write_bytes(b"")
    with Writer(table, {}) as writer:
        writer.finish(None, {})
    assert table.rows().equals(before)
    check_tensors(table)


def test_a_shard_that_ends_before_its_last_tensor_is_lost_as_a_whole(tmp_path: Path):
    table = written(tmp_path / "t", *range(6), schema=PAIRS, shard_bytes=2200)
    path = sorted(table.shards.glob("*.arrow"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert numbers(table.rows()) == [3, 4, 5]
    with Writer(table, {}) as writer:
        assert numbers(writer.stored) == [3, 4, 5]


def test_cleaning_moves_both_tensors_of_a_row(tmp_path: Path):
    table = written(tmp_path / "t", *range(20), schema=PAIRS, shard_bytes=3600)
    with Writer(table, {}) as writer:
        writer.finish(names(0, 7, 11, 19), {})
        assert writer.collect() > 0
    assert numbers(table.rows()) == [0, 7, 11, 19] and table.usage()["shards"] == 1
    check_tensors(table)


def test_a_reader_gives_the_first_tensor_or_the_one_that_is_named(tmp_path: Path):
    table = written(tmp_path / "t", 3, schema=PAIRS)
    reader = table.tensors()
    assert reader.read("row-00003").dtype == reader.read("row-00003", "ids").dtype == np.int32
    assert reader.read("row-00003", "signs").dtype == np.int8
    with pytest.raises(KeyError):
        reader.read("row-00003", "tensor")
    reader.ahead(["row-00003"])
    opened = Table(table)
    assert opened["row-00003"].keys() == {"ids", "signs"}


def test_a_tensor_whose_size_differs_from_its_shape_is_refused_by_its_name(tmp_path: Path):
    wrong = pairs(1).to_pylist()[0] | {"signs_shape": [7]}
    with (
        pytest.raises(ValueError, match=r"signs of 303 values, but its shape is \[7\]"),
        Writer(TableFolder(tmp_path / "t", PAIRS), {}) as writer,
    ):
        writer.append(pa.RecordBatch.from_pylist([wrong], schema=PAIRS.batch))


@pytest.mark.parametrize(("dtype", "viewed"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32")])
def test_the_python_api_shows_16_bit_words_as_the_floats_that_they_are(tmp_path: Path, dtype: str, viewed: str):
    schema = schema_of([dtype])
    row = row_of(schema, 0, [[2, 3]])
    with Writer(TableFolder(tmp_path / "t", schema), {}) as writer:
        writer.append(schema.table([row]).combine_chunks().to_batches()[0])
        writer.finish(None, {})
    values = Table(TableFolder(tmp_path / "t", schema))["row 0"]
    assert values.dtype.name == viewed and values.shape == (2, 3)
    assert values.tobytes() == row["t0"].tobytes()
