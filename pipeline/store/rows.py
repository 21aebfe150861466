"""Questions about sets of rows: which are new, which are wanted, which are the newest of their key."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.table import TableSchema


def missing(wanted: pa.Table, stored: pa.Table) -> pa.Table:
    """The rows of `wanted`, in order, that no row of `stored` equals in all columns of `wanted`; null equals null."""
    return wanted.filter(pc.invert(matches(wanted, stored, wanted.column_names)))


def matches(rows: pa.Table, others: pa.Table, columns: list[str]) -> pa.Array:
    """For each of `rows`, whether one of `others` equals it in those columns; null equals null."""
    found = np.zeros(rows.num_rows, bool)
    if _same(rows.select(columns), others.select(columns)):  # the common case, and DuckDB takes long to begin
        return pa.array(~found)
    if rows.num_rows and others.num_rows:
        import duckdb

        same = " and ".join(f'rows."{name}" is not distinct from others."{name}"' for name in columns)
        places = pa.array(np.arange(rows.num_rows))
        with duckdb.connect() as connection:
            connection.register("rows", rows.select(columns).append_column("#", places))
            connection.register("others", others.select(columns))
            answer = connection.execute(f'select "#" from rows semi join others on {same}').fetchnumpy()
        found[answer["#"]] = True
    return pa.array(found)


def _same(rows: pa.Table, others: pa.Table) -> bool:
    """Whether two tables hold the same rows in whatever order; False where that would be dear to say."""
    if rows.num_rows != others.num_rows or rows.schema.types != others.schema.types:
        return False
    if any(pa.types.is_nested(kind) for kind in rows.schema.types):
        return False
    order = [(name, "ascending") for name in rows.column_names]
    pairs = zip(rows.sort_by(order).columns, others.sort_by(order).columns, strict=True)
    return all(mine.equals(other) for mine, other in pairs)  # tables would differ in whether a column may hold nulls


def newest(rows: pa.Table, key: tuple[str, ...]) -> pa.Table:
    """The last row of each key, in the order of writing."""
    places = rows.select(key).append_column("#", pa.array(np.arange(rows.num_rows)))
    last = places.group_by(list(key)).aggregate([("#", "max")])["#_max"].to_numpy()
    return rows if len(last) == rows.num_rows else rows.take(pa.array(np.sort(last), pa.int64()))


def conform(batch: pa.RecordBatch, schema: TableSchema) -> pa.RecordBatch:
    """The batch with exactly `schema.batch`. ValueError naming what differs: a column, a type, a null, a tensor's size."""
    want = schema.batch
    if batch.schema.names != want.names:
        wrong = sorted(set(batch.schema.names) ^ set(want.names)) or ["the order of columns"]
        raise ValueError(f"a batch of {schema.name} differs from its schema in {', '.join(wrong)}")
    for got, field in zip(batch.schema, want, strict=True):
        if _loose(got.type) != _loose(field.type):
            raise ValueError(f"a batch of {schema.name} has {got.type} in column {field.name}, which is {field.type}")
        if not field.nullable and batch.column(field.name).null_count:
            raise ValueError(f"a batch of {schema.name} has a null in column {field.name}")
    batch = batch.cast(want)
    if schema.tensors:
        _check_tensors(batch, schema)
    return batch


def _loose(kind: pa.DataType) -> str:
    return str(kind).replace(" not null", "")  # whether a list says that it holds no nulls makes no difference to its bytes


def _check_tensors(batch: pa.RecordBatch, schema: TableSchema) -> None:
    for tensor in schema.tensors:
        counts = pc.list_value_length(batch.column(tensor.name)).to_pylist()
        for shape, count in zip(batch.column(tensor.shape).to_pylist(), counts, strict=True):
            if count != math.prod(shape) and (count or shape):
                raise ValueError(f"a batch of {schema.name} has {tensor.name} of {count} values, and says its shape is {shape}")
