"""Comparing sets of rows: which are missing, which match, which is the newest of each key, which fit the schema."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.table import TableSchema


def missing(wanted: pa.Table, stored: pa.Table) -> pa.Table:
    """Return the rows of `wanted`, in order, that `stored` lacks. A row is lacking if no row of `stored` has equal values in
    all columns of `wanted`. Two nulls are equal.
    """
    return wanted.filter(pc.invert(matches(wanted, stored, wanted.column_names)))


def matches(rows: pa.Table, others: pa.Table, columns: list[str]) -> pa.Array:
    """Return a boolean array with one value per row of `rows`: True if some row of `others` has equal values in all of
    `columns`. Two nulls are equal.
    """
    found = np.zeros(rows.num_rows, bool)
    if _same_rows(rows.select(columns), others.select(columns)):  # the common case; starting DuckDB takes longer
        return pa.array(~found)
    if rows.num_rows and others.num_rows:
        import duckdb

        equal = " and ".join(f'rows."{name}" is not distinct from others."{name}"' for name in columns)
        positions = pa.array(np.arange(rows.num_rows))
        with duckdb.connect() as connection:
            connection.register("rows", rows.select(columns).append_column("#", positions))
            connection.register("others", others.select(columns))
            answer = connection.execute(f'select "#" from rows semi join others on {equal}').fetchnumpy()
        found[answer["#"]] = True
    return pa.array(found)


def _same_rows(rows: pa.Table, others: pa.Table) -> bool:
    """Return True if the tables `rows` and `others` hold the same rows, in any order. Always return False for tables
    with nested columns, which are not compared.
    """
    if rows.num_rows != others.num_rows or rows.schema.types != others.schema.types:
        return False
    if any(pa.types.is_nested(kind) for kind in rows.schema.types):
        return False
    order = [(name, "ascending") for name in rows.column_names]
    pairs = zip(rows.sort_by(order).columns, others.sort_by(order).columns, strict=True)
    return all(one.equals(other) for one, other in pairs)  # by column: the tables' schemas may differ in nullability


def newest_per_key(rows: pa.Table, key: tuple[str, ...]) -> pa.Table:
    """Return only the last row of each key, in the order of `rows`. `rows` must be in the order in which they were written.
    `key` holds the names of the key columns.
    """
    positions = rows.select(key).append_column("#", pa.array(np.arange(rows.num_rows)))
    last = positions.group_by(list(key)).aggregate([("#", "max")])["#_max"].to_numpy()
    return rows if len(last) == rows.num_rows else rows.take(pa.array(np.sort(last), pa.int64()))


def conform(batch: pa.RecordBatch, schema: TableSchema) -> pa.RecordBatch:
    """Return the record batch `batch` of a stage, cast to the types of `schema.batch`. This Arrow schema lists the
    columns of the table, then one list column per tensor. Raises ValueError if a column is missing, unknown, of another
    type or in the wrong place. Raises it too if a null is not allowed, or if a tensor's number of values does not fit
    its shape.
    """
    expected = schema.batch
    if batch.schema.names != expected.names:
        wrong = sorted(set(batch.schema.names) ^ set(expected.names)) or ["the order of columns"]
        raise ValueError(f"a batch of {schema.name} differs from its schema in {', '.join(wrong)}")
    for got, field in zip(batch.schema, expected, strict=True):
        if _without_nullability(got.type) != _without_nullability(field.type):
            raise ValueError(f"a batch of {schema.name}: column {field.name} must be {field.type}, got {got.type}")
        if not field.nullable and batch.column(field.name).null_count:
            raise ValueError(f"a batch of {schema.name}: column {field.name} must not be null")
    batch = batch.cast(expected)
    _check_shapes(batch, schema)
    return batch


def _check_shapes(batch: pa.RecordBatch, schema: TableSchema) -> None:
    """Raise ValueError if a tensor in the record batch `batch` does not have as many values as its shape says. `schema`
    describes the table of the batch. A tensor without values may have an empty shape.
    """
    for tensor in schema.tensors:
        counts = pc.list_value_length(batch.column(tensor.name)).to_pylist()
        for shape, count in zip(batch.column(tensor.shape).to_pylist(), counts, strict=True):
            if count != math.prod(shape) and (count or shape):
                raise ValueError(f"a batch of {schema.name} has {tensor.name} of {count} values, but its shape is {shape}")


def _without_nullability(kind: pa.DataType) -> str:
    """Return the name of the Arrow type `kind` as text, without the words "not null". Two list types that differ only
    in whether items may be null get the same name.
    """
    return str(kind).replace(" not null", "")
