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
    """Yield the pending rows of a stage as work units of at most `size` rows. A unit can be pickled, and `perform`
    computes it in any process. `module` is the dotted name of the module that defines `stage` as `STAGE`. `ctx` is the
    stage's context, with the pending rows. `inputs` is the result of `Project.inputs`: table name -> folder and
    version.

    If `stage.divisible` is False, one unit holds all pending rows. If any row is pending, missing weights are
    downloaded first.
    """
    size = size if stage.divisible else max(1, ctx.pending.num_rows)
    needs = {name: ctx.need(name) for name in stage.needs} if ctx.pending.num_rows else {}
    key = [name for name in stage.writes.key if name in ctx.pending.column_names]
    outdated = ctx.stored.filter(matches(ctx.stored, ctx.pending, key))  # few rows, and usually none
    for start in range(0, ctx.pending.num_rows, size):
        pending = ctx.pending.slice(start, size).combine_chunks()
        stored = outdated.filter(matches(outdated, pending, key)) if outdated.num_rows else outdated
        yield WorkUnit(module, ctx.config, pending, stored, inputs, needs, ctx.artifacts, ctx.root, ctx.provenance)


class Kept:
    """What a process keeps from one work unit to the next: the rows of input tables, and one model. All units must be of
    one stage, with one config.
    """

    def __init__(self) -> None:
        self.tables: dict[tuple[Path, int], pa.Table] = {}
        self.name, self.value = "", None

    def rows(self, table: TableFolder, version: int) -> pa.Table:
        """Return the rows of the input table `table` as they were at its version `version`. They are read from disk at
        the first call.
        """
        key = table.folder, version
        if key not in self.tables:
            self.tables[key] = table.rows(version)
        return self.tables[key]

    def model(self, name: str, load: Callable[[], Any]) -> Any:
        """Return the model called `name`. Only one model is in memory at a time. If that is the model `name`, it is
        returned. Otherwise it is released, and the result of `load()` is kept in its place and returned.
        """
        if self.name != name:
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
    """Compute the pending rows of the work unit `unit`, and yield them as record batches. Files that the rows name are
    yielded as `Artifact` before their batch. `say(line)` and `progress(done, total, unit)` receive reports for the
    user; by default nothing happens. `stop()` returns True to end the stage early; some rows are then missing. By
    default it never ends early. `kept` holds the weights and tables of earlier units of the stage; None reads them
    anew.

    Only a temporary folder is written to, if the stage writes artifacts. A process that performs many units of one
    stage passes the same `kept` to all of them, so that weights and tables are read once.
    """
    stage: Stage = load(f"{unit.stage}:STAGE")
    with TemporaryArtifacts() as files:
        ctx = _context(unit, stage, kept, files)
        ctx.say, ctx.progress, ctx.stop = say, progress, stop
        for batch in stage.run(ctx):
            yield from files.take()
            yield batch
        yield from files.take()


class TemporaryArtifacts:
    """The files that a work unit writes, kept in a temporary folder until the runner takes them. It is a context
    manager. The folder is made for the first file, because few stages write files. It is removed when the context ends.
    """

    def __init__(self) -> None:
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.written: list[Artifact] = []

    def __enter__(self) -> TemporaryArtifacts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.folder:
            self.folder.cleanup()

    def write(self, name: str, write: Callable[[Path], None]) -> Path:
        """Write one file and return its path. `name` is its path below the table's artifacts folder. `write(path)` must
        create it.
        """
        self.folder = self.folder or tempfile.TemporaryDirectory(prefix="latentmill-")
        path = Path(self.folder.name, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
        self.written.append(Artifact(name, path.read_bytes()))
        return path

    def take(self) -> Iterator[Artifact]:
        """Yield the files that were written since the last call."""
        yield from self.written
        self.written.clear()


def _context(unit: WorkUnit, stage: Stage, kept: Kept | None, files: TemporaryArtifacts) -> StageContext:
    """Return the context in which `stage` computes the work unit `unit`, a part of its rows. `kept` is what this
    process keeps between units, such as a model. None keeps nothing. `files` receives the artifacts that the stage
    writes. The context's functions for reports to the user do nothing.
    """
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
    """Return the artifacts folder of a table that `stage` reads. `schema` describes the table. `unit` is the work unit
    that names the folders of its input tables. If an optional table was not built, the returned folder does not exist.
    """
    if schema in stage.optional and schema.name not in unit.inputs:
        return unit.root / "tables" / schema.name / "none" / "artifacts"
    return unit.inputs[schema.name].folder / "artifacts"
