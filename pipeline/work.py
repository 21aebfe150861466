"""Work units: pending rows of a stage, computed in any process and committed by the runner.

units = divide(...)                                 in the process of the runner; units and results can be pickled
results = [list(perform(unit)) for unit in units]   in any process that sees the same folders
runner.run(project, name, console, compute=...)     yields the results to be committed
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from pipeline.store.checksums import Checksums
from pipeline.store.rows import matches
from pipeline.store.table import TableFolder
from schemas.table import TableSchema
from stages.pipelines import load
from stages.stage import Artifact, Input, Stage, StageContext, WorkUnit


def divide(module: str, stage: Stage, ctx: StageContext, inputs: Mapping[str, Input], size: int) -> Iterator[WorkUnit]:
    """Pending rows as units of at most `size` rows; one unit if the stage is not divisible. Downloads missing weights first."""
    size = size if stage.divisible else max(1, ctx.pending.num_rows)
    needs = {name: ctx.need(name) for name in stage.needs} if ctx.pending.num_rows else {}
    key = [name for name in stage.writes.key if name in ctx.pending.column_names]
    outdated = ctx.stored.filter(matches(ctx.stored, ctx.pending, key))  # few rows, and usually none
    for start in range(0, ctx.pending.num_rows, size):
        pending = ctx.pending.slice(start, size).combine_chunks()
        stored = outdated.filter(matches(outdated, pending, key)) if outdated.num_rows else outdated
        yield WorkUnit(module, ctx.config, pending, stored, inputs, needs, ctx.artifacts, ctx.root, ctx.provenance)


class Kept:
    """What a process keeps between units of one stage and config: rows of input tables, and one model."""

    def __init__(self) -> None:
        self.tables: dict[tuple[Path, int], pa.Table] = {}
        self.name, self.value = "", None

    def rows(self, table: TableFolder, version: int) -> pa.Table:
        key = table.folder, version
        if key not in self.tables:
            self.tables[key] = table.rows(version)
        return self.tables[key]

    def model(self, name: str, load: Callable[[], Any]) -> Any:
        if self.name != name:
            # The old model goes first: only one is in memory at a time.
            self.name, self.value = "", None
            gc.collect()
            self.value, self.name = load(), name
        return self.value


def perform(
    unit: WorkUnit,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int, str], None] = lambda done, total, unit: None,
    stop: Callable[[], bool] = lambda: False,
    kept: Kept | None = None,
) -> Iterator[pa.RecordBatch | Artifact]:
    """Batches of the unit's pending rows, each after its artifacts. `stop()` ends early; rows are then missing."""
    stage: Stage = load(f"{unit.stage}:STAGE")
    # Nothing else is written: the runner commits what is yielded.
    with TemporaryArtifacts() as files:
        ctx = _context(unit, stage, kept, files)
        ctx.say, ctx.progress, ctx.stop = say, progress, stop
        for batch in stage.run(ctx):
            yield from files.take()
            yield batch
        yield from files.take()


class TemporaryArtifacts:
    """Files that a unit writes, in a temporary folder until the runner takes them."""

    def __init__(self) -> None:
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.written: list[Artifact] = []

    def __enter__(self) -> TemporaryArtifacts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.folder:
            self.folder.cleanup()

    def write(self, name: str, write: Callable[[Path], None]) -> Path:
        # Made for the first file: few stages write files.
        self.folder = self.folder or tempfile.TemporaryDirectory(prefix="latentmill-")
        path = Path(self.folder.name, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
        self.written.append(Artifact(name, path.read_bytes()))
        return path

    def take(self) -> Iterator[Artifact]:
        yield from self.written
        self.written.clear()


def _context(unit: WorkUnit, stage: Stage, kept: Kept | None, files: TemporaryArtifacts) -> StageContext:
    once = kept or Kept()

    def table(schema: TableSchema) -> TableFolder:
        return TableFolder(unit.inputs[schema.name].folder, schema)

    def intact(schema: TableSchema, name: str) -> bool:
        own = schema.name == stage.name
        folder = unit.artifacts.parent if own else unit.inputs[schema.name].folder
        return not Checksums(folder).damage(f"artifacts/{name}")

    return StageContext(
        config=unit.config,
        artifacts=unit.artifacts,
        stored=unit.stored,
        pending=unit.pending,
        rows=lambda schema: once.rows(table(schema), unit.inputs[schema.name].version),
        tensors=lambda schema: table(schema).tensors(unit.inputs[schema.name].version),
        files=lambda schema: _artifacts(unit, schema, stage),
        need=unit.needs.__getitem__,
        write_artifact=files.write,
        say=lambda line: None,
        progress=lambda done, total, unit: None,
        stop=lambda: False,
        root=unit.root,
        provenance=dict(unit.provenance),
        intact=intact,
        reuse=kept.model if kept else lambda name, load: load(),
    )


def _artifacts(unit: WorkUnit, schema: TableSchema, stage: Stage) -> Path:
    if schema in stage.optional and schema.name not in unit.inputs:
        # An optional table that was not built: the folder does not exist.
        return unit.root / "tables" / schema.name / "none" / "artifacts"
    return unit.inputs[schema.name].folder / "artifacts"
