"""Work units: rows of one stage computed in any process, without writing to a table."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from pipeline.store.rows import matches
from pipeline.store.table import TableFolder
from schemas.table import TableSchema
from stages.stage import Artifact, Input, Stage, StageContext, WorkUnit, load


def divide(module: str, stage: Stage, ctx: StageContext, inputs: dict[str, Input], size: int) -> Iterator[WorkUnit]:
    """The pending rows of `ctx` as work units of at most `size` rows; one unit if the stage is not divisible.

    `module` is where the stage's STAGE is found. Weights that the stage needs are located, and fetched if they are missing.
    """
    size = size if stage.divisible else max(1, ctx.pending.num_rows)
    needs = {name: ctx.need(name) for name in stage.needs} if ctx.pending.num_rows else {}
    keys = [name for name in stage.writes.key if name in ctx.pending.column_names]
    for start in range(0, ctx.pending.num_rows, size):
        pending = ctx.pending.slice(start, size).combine_chunks()
        stored = ctx.stored.filter(matches(ctx.stored, pending, keys))
        yield WorkUnit(module, ctx.config, pending, stored, inputs, needs, ctx.artifacts, ctx.root, ctx.provenance)


def perform(
    unit: WorkUnit,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int, str], None] = lambda done, total, unit: None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[pa.RecordBatch | Artifact]:
    """Compute a work unit. Yields its batches, and before each the artifacts that its rows may name.

    Nothing is written but files in a temporary folder of this process.
    """
    stage: Stage = load(f"{unit.stage}:STAGE")
    made: list[Artifact] = []

    def write_artifact(name: str, write: Callable[[Path], None]) -> Path:
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
        made.append(Artifact(name, path.read_bytes()))
        return path

    def table(schema: TableSchema) -> TableFolder:
        return TableFolder(unit.inputs[schema.name].folder, schema)

    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        ctx = StageContext(
            config=unit.config,
            artifacts=unit.artifacts,
            stored=unit.stored,
            pending=unit.pending,
            rows=lambda schema: table(schema).rows(unit.inputs[schema.name].version),
            tensors=lambda schema: table(schema).tensors(unit.inputs[schema.name].version),
            files=lambda schema: unit.inputs[schema.name].folder / "artifacts",
            need=unit.needs.__getitem__,
            write_artifact=write_artifact,
            say=say,
            progress=progress,
            stop=stop,
            root=unit.root,
            provenance=dict(unit.provenance),
        )
        for batch in stage.run(ctx):
            yield from made
            made.clear()
            yield batch
        yield from made
