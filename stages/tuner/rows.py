"""The rows of a run: one for each sample of a training step, and one for each held-out sample of a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from stages.tuner.task import Row, Task
from stages.tuner.validation import TRAIN, VALIDATION, measured_steps


def wanted_rows(task: Task[Any, Any], last: int) -> pa.Table:
    """The keys (step, split, sample) of all rows of a run that ends at step `last`."""
    sizes = [sum(task.sizes(step)) for step in range(1, last + 1)]
    trained = _keys(TRAIN, range(1, last + 1), sizes)
    if task.config.validation is None or task.held_out is None:
        return trained
    steps = measured_steps(task.config.validation.every, last)
    return pa.concat_tables([trained, _keys(VALIDATION, steps, [task.held_out.count] * len(steps))])


def _keys(split: str, steps: Sequence[int], sizes: Sequence[int]) -> pa.Table:
    step = np.repeat(np.array(steps, np.int32), sizes)
    sample = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes] or [np.zeros(0, np.int32)])
    return pa.table({"step": step, "split": pa.array([split] * len(step), pa.string()), "sample": sample})


def sample_rows(
    task: Task[Any, Any], samples: Sequence[Any], values: Mapping[str, Sequence[Any]], shared: Row, first: int = 0
) -> list[Row]:
    """`values`: column -> one value per sample; `shared`: column -> value of all; `sample` counts from `first`."""
    nothing: Row = dict.fromkeys(field.name for field in task.schema if field.nullable)
    return [
        nothing | {"sample": first + n} | task.row(sample) | {name: each[n] for name, each in values.items()} | shared
        for n, sample in enumerate(samples)
    ]


def rows_table(schema: pa.Schema, rows: list[Row]) -> pa.Table:
    names = set(schema.names)
    for row in rows:
        assert set(row) == names, f"columns {sorted(set(row) ^ names)} are missing or unknown"
    return pa.Table.from_pylist(rows, schema=schema)


def record_batches(schema: pa.Schema, rows: list[Row]) -> list[pa.RecordBatch]:
    return rows_table(schema, rows).combine_chunks().to_batches() if rows else []
