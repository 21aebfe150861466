"""A stage context made of tables in memory, and the runner's loop in ten lines, so that a stage can be tested alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.table import TableSchema
from stages.stage import Stage, StageContext


class MemoryTensors:
    """A TensorReader over a table of batches that still hold their `tensor` column."""

    def __init__(self, table: pa.Table, key: str) -> None:
        columns = zip(table[key].to_pylist(), table["shape"].to_pylist(), table["tensor"].to_pylist(), strict=True)
        self.values = {k: np.array(v, np.uint16).reshape(shape) for k, shape, v in columns}

    def read(self, key: str, name: str = "") -> np.ndarray:
        return self.values[key]

    def ahead(self, keys: Iterable[str]) -> None:
        assert all(k in self.values for k in keys)


def missing(wanted: pa.Table, stored: pa.Table) -> pa.Table:
    """The wanted rows that no stored row equals in all wanted columns."""
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
    """A context for `stage` whose inputs are `tables` (by stage_name; tensor tables with their `tensor` column)."""
    tables = tables or {}
    needs = {"family": family, "image_folder": source or folder, **(weights or {})}
    (folder / "artifacts").mkdir(parents=True, exist_ok=True)

    def rows(schema: TableSchema) -> pa.Table:
        assert schema in stage.reads, f"{stage.name} does not say that it reads {schema.name}"
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
    made.pending = missing(stage.wants(made), made.stored)
    return made


def run(stage: Stage, made: StageContext) -> pa.Table:
    """Every batch that the stage yields, as one table; each must have the columns of its schema."""
    batches = []
    for batch in chain(stage.run(made), stage.finish(made) if stage.finish else ()):
        assert batch.schema.names == stage.writes.batch.names
        batches.append(batch.cast(stage.writes.batch))
    return pa.Table.from_batches(batches, schema=stage.writes.batch)
