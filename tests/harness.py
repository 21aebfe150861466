"""Runs one stage in memory: a Run over Arrow tables, and a short form of the runner's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.project.stage_run import open_run
from pipeline.runner import pending_rows
from pipeline.store.rows import newest_per_key
from schemas.table import TableSchema
from stages.run import Report, Run
from stages.stage import Input, Stage, WorkUnit


def tensors_of(table: pa.Table, key: str) -> dict[str, np.ndarray]:
    columns = zip(table[key].to_pylist(), table["shape"].to_pylist(), table["tensor"].to_pylist(), strict=True)
    return {k: np.array(v, np.uint16).reshape(shape) for k, shape, v in columns}


def rows_of(schema: TableSchema, *rows: dict[str, Any]) -> pa.Table:
    """Rows, with a harmless value in every column that is not given."""
    blank = {pa.string(): "", pa.bool_(): False}
    default = {f.name: None if f.nullable else [] if pa.types.is_list(f.type) else blank.get(f.type, 0) for f in schema.batch}
    return pa.Table.from_batches([schema.record_batch([default | row for row in rows])])


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
) -> Run[Any]:
    """`tables`: the inputs by name; those with tensors have their `tensor` column."""
    needs = {"family": family, "image_folder": source or folder, **(weights or {})}
    (folder / "artifacts").mkdir(parents=True, exist_ok=True)
    inputs = {}
    for each in (*stage.reads, *stage.optional):
        if each.name in needs:  # the folder of its artifacts
            link = folder / "inputs" / each.name / "artifacts"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(needs[each.name].absolute())
        if each.name in needs or each.name in (tables or {}):
            inputs[each.name] = Input(folder / "inputs" / each.name, rows=(tables or {}).get(each.name))

    empty = pa.table({f.name: pa.array([], f.type) for f in stage.writes.columns})
    unit = WorkUnit(
        stage=stage.run.__module__,
        config=config if config is not None else stage.config(),
        pending=empty,
        stored=stored if stored is not None else empty,
        inputs=inputs,
        needs=needs,
        artifacts=folder / "artifacts",
        root=Path(),
        provenance={},
    )
    made = open_run(unit, Report(stop=stop), writer_into(folder / "artifacts"))
    made.output.pending = pending_rows(stage, made, stage.wants(made))
    return made


def writer_into(folder: Path) -> Callable[[str, Callable[[Path], None]], Path]:
    """A function (name, write) that writes the artifact `name`, and renames it when it is whole."""

    def keep(name: str, write: Callable[[Path], None]) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(unfinished := path.with_name(f".tmp-{path.name}"))
        return unfinished.rename(path)

    return keep


def run(stage: Stage, made: Run[Any]) -> pa.Table:
    """Compute the pending rows and finish, as the runner does. Returns every batch that the stage yields, as one table."""
    rows = collect(stage, stage.run(made))
    if stage.finish is None:
        return rows
    stored = rows.select([column.name for column in stage.writes.columns])
    before = made.output.stored.select(stored.column_names).cast(stored.schema)
    made.output.stored = newest_per_key(pa.concat_tables([before, stored]), stage.writes.key)
    return pa.concat_tables([rows, collect(stage, stage.finish(made))])


def collect(stage: Stage, batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """Each batch must have the columns of the stage's schema."""
    found = []
    for batch in batches:
        assert batch.schema.names == stage.writes.batch.names
        found.append(batch.cast(stage.writes.batch))
    return pa.Table.from_batches(found, schema=stage.writes.batch)


def compared(schema: TableSchema) -> list[str]:
    return [field.name for field in schema.columns if not field.metadata[b"measured"]]
