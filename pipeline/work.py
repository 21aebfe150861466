"""Work units: pending rows of a stage, computed in any process and committed by the runner.

units = divide(...)                                 in the process of the runner; units and results can be pickled
results = [list(perform(unit)) for unit in units]   in any process that sees the same folders
runner.run(project, name, console, compute=...)     yields the results to be committed
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from pipeline.project.stage_run import Kept, open_run
from pipeline.store.rows import matches
from stages.pipelines import load
from stages.run import Report, Run
from stages.stage import Artifact, Input, Stage, WorkUnit

Item: TypeAlias = pa.RecordBatch | Artifact  # what a stage makes: rows, and files that rows name


def divide(module: str, stage: Stage, run: Run[Any], inputs: Mapping[str, Input], size: int) -> Iterator[WorkUnit]:
    """Pending rows as units of at most `size` rows; one unit if the stage is not divisible. Downloads missing weights first."""
    size = size if stage.divisible else max(1, run.output.pending.num_rows)
    needs = {name: run.needs[name] for name in stage.needs} if run.output.pending.num_rows else {}
    key = [name for name in stage.writes.key if name in run.output.pending.column_names]
    outdated = run.output.stored.filter(matches(run.output.stored, run.output.pending, key))  # few rows, and usually none
    for start in range(0, run.output.pending.num_rows, size):
        pending = run.output.pending.slice(start, size).combine_chunks()
        stored = outdated.filter(matches(outdated, pending, key)) if outdated.num_rows else outdated
        output = run.output
        yield WorkUnit(module, run.config, pending, stored, inputs, needs, output.artifacts, run.root, output.provenance)


def perform(unit: WorkUnit, report: Report | None = None, kept: Kept | None = None) -> Iterator[Item]:
    """Batches of the unit's pending rows, each after its artifacts. `report.stop` ends early; rows are then missing."""
    stage: Stage = load(f"{unit.stage}:STAGE")
    written: list[Artifact] = []
    # Nothing else is written: the runner commits what is yielded.
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:

        def write_artifact(name: str, write: Callable[[Path], None]) -> Path:
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
            written.append(Artifact(name, path.read_bytes()))
            return path

        for batch in stage.run(open_run(unit, report, write_artifact, kept)):
            yield from written
            written.clear()
            yield batch
        yield from written
