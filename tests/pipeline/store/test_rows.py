"""Which rows are missing."""

import sys

import numpy as np
import pyarrow as pa
import pytest

from pipeline.store.rows import missing
from tests.pipeline.store.stores import name_of


def test_missing_rows_differ_in_some_wanted_column_null_equals_null_and_order_is_kept():
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


def test_equal_rows_in_another_order_are_found_without_duckdb(monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    rows = pa.table({"a": [1, 2, 3], "b": ["x", None, "z"]})
    strict = rows.cast(pa.schema([pa.field("a", pa.int64(), nullable=False), rows.schema.field("b")]))
    assert missing(rows, strict.take([2, 0, 1])).num_rows == 0
    with pytest.raises(ImportError):
        missing(rows, rows.slice(1))
