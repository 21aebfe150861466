"""Runs one stage in memory: a StageContext over Arrow tables, and a short form of the runner's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.errors import NotBuilt
from pipeline.runner import pending_rows
from pipeline.store.rows import newest_per_key
from schemas.table import TableSchema
from stages.stage import Stage, StageContext


class MemoryTensors:
    """A TensorReader over a table in memory that still has its `tensor` column."""

    def __init__(self, table: pa.Table, key: str) -> None:
        columns = zip(table[key].to_pylist(), table["shape"].to_pylist(), table["tensor"].to_pylist(), strict=True)
        self.values = {k: np.array(v, np.uint16).reshape(shape) for k, shape, v in columns}

    def read(self, key: str, name: str = "") -> np.ndarray:
        return self.values[key]

    def ahead(self, keys: Iterable[str]) -> None:
        assert all(k in self.values for k in keys)


def missing(wanted: pa.Table, stored: pa.Table) -> pa.Table:
    """Return the wanted rows that differ from every stored row in at least one wanted column."""
    have = {tuple(map(str, row.values())) for row in stored.select(wanted.column_names).to_pylist()}
    keep = [tuple(map(str, row.values())) not in have for row in wanted.to_pylist()]
    return wanted.filter(pa.array(keep, pa.bool_()))


def context(
    stage: Stage,
    folder: Path,
    tables: dict[str, pa.Table] | None = None,
    *,
    config: Any = None,
    family: Any = None,
    weights: dict[str, Path] | None = None,
    stored: pa.Table | None = None,
    stop: Callable[[], bool] = lambda: False,
    source: Path | None = None,
) -> StageContext:
    """Return the context of a stage whose inputs are `tables`, by name; tables with tensors have their `tensor` column."""
    tables = tables or {}
    needs = {"family": family, "image_folder": source or folder, **(weights or {})}
    (folder / "artifacts").mkdir(parents=True, exist_ok=True)

    def rows(schema: TableSchema) -> pa.Table:
        if schema in stage.optional and schema.name not in tables:
            raise NotBuilt(f"{schema.name} is not built", schema.name)
        assert schema in (*stage.reads, *stage.optional), f"{stage.name} does not say that it reads {schema.name}"
        return tables[schema.name].drop_columns([tensor.name for tensor in schema.tensors])

    def tensors(schema: TableSchema) -> MemoryTensors:
        return MemoryTensors(tables[schema.name], schema.key[0])

    def write_artifact(name: str, write: Callable[[Path], None]) -> Path:
        path = folder / "artifacts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
        return path

    empty = pa.table({f.name: pa.array([], f.type) for f in stage.writes.columns})
    made = StageContext(
        config=config if config is not None else stage.config(),
        artifacts=folder / "artifacts",
        stored=stored if stored is not None else empty,
        pending=empty,
        rows=rows,
        tensors=tensors,
        files=lambda schema: needs[schema.name],
        need=needs.__getitem__,
        write_artifact=write_artifact,
        say=lambda line: None,
        progress=lambda done, total, unit: None,
        stop=stop,
    )
    made.pending = pending_rows(stage, made, stage.wants(made))
    return made


def run(stage: Stage, made: StageContext) -> pa.Table:
    """Compute the pending rows and finish, as the runner does. Returns every batch that the stage yields, as one table."""
    rows = collect(stage, stage.run(made))
    if stage.finish is None:
        return rows
    stored = rows.select([column.name for column in stage.writes.columns])
    before = made.stored.select(stored.column_names).cast(stored.schema)
    made.stored = newest_per_key(pa.concat_tables([before, stored]), stage.writes.key)
    return pa.concat_tables([rows, collect(stage, stage.finish(made))])


def collect(stage: Stage, batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """Join batches to one table. Each must have the columns of the stage's schema."""
    found = []
    for batch in batches:
        assert batch.schema.names == stage.writes.batch.names
        found.append(batch.cast(stage.writes.batch))
    return pa.Table.from_batches(found, schema=stage.writes.batch)
