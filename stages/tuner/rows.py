"""The rows of a run: one for each sample of a training step, and one for each held-out sample of a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from stages.tuner.task import Row, Task
from stages.tuner.validation import TRAIN, VALIDATION, measured_steps


def wanted_rows(task: Task[Any, Any], last: int) -> pa.Table:
    """Return the keys of all rows that a run with the last step `last` must produce, as an Arrow table. `task` supplies
    data, model and settings. The columns are `step`, `split` and `sample`. `split` is "train" or "validation". `sample`
    is the sample's index in the step or measurement.
    """
    sizes = [sum(task.sizes(step)) for step in range(1, last + 1)]
    trained = _keys(TRAIN, range(1, last + 1), sizes)
    if task.config.validation is None or task.held_out is None:
        return trained
    steps = measured_steps(task.config.validation.every, last)
    return pa.concat_tables([trained, _keys(VALIDATION, steps, [task.held_out.count] * len(steps))])


def _keys(split: str, steps: Sequence[int], sizes: Sequence[int]) -> pa.Table:
    """Return a table of row keys (step, split, sample). `split` is "train" or "validation". The step `steps[n]` has `sizes[n]`
    samples, numbered from 0.
    """
    step = np.repeat(np.array(steps, np.int32), sizes)
    sample = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes] or [np.zeros(0, np.int32)])
    return pa.table({"step": step, "split": pa.array([split] * len(step), pa.string()), "sample": sample})


def sample_rows(
    task: Task[Any, Any], samples: Sequence[Any], values: Mapping[str, Sequence[Any]], shared: Row, first: int = 0
) -> list[Row]:
    """Return one row per sample as a dict from column to value, in the order of `samples`. `values` maps a column to a
    list with one value per sample. `shared` maps a column to a value for all samples. The column `sample` is numbered
    from `first`. `task.row` gives further columns. Nullable columns without a value are None.
    """
    nothing: Row = dict.fromkeys(field.name for field in task.schema if field.nullable)
    return [
        nothing | {"sample": first + n} | task.row(sample) | {name: each[n] for name, each in values.items()} | shared
        for n, sample in enumerate(samples)
    ]


def rows_table(schema: pa.Schema, rows: list[Row]) -> pa.Table:
    """Return a table of the given schema with the given rows (dicts column -> value). Every row must have exactly the columns of
    the schema.
    """
    names = set(schema.names)
    for row in rows:
        assert set(row) == names, f"columns {sorted(set(row) ^ names)} are missing or unknown"
    return pa.Table.from_pylist(rows, schema=schema)


def record_batches(schema: pa.Schema, rows: list[Row]) -> list[pa.RecordBatch]:
    """Return the rows as a list with one record batch of the given schema. Each row is a dict column -> value. If there are no
    rows, the list is empty.
    """
    return rows_table(schema, rows).combine_chunks().to_batches() if rows else []
