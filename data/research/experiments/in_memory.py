"""Run stages of a project in memory. No table is written to disk; only artifacts (files that rows name) are.

An experiment repeats a chain many times with other settings, also on machines without Lance. A stage gets the same context
as from the runner, so it computes the same rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.project.project import Project
from stages.run import Report, Run
from stages.stage import Input


class MemoryTables:
    """Tables of a project in memory. Artifacts are written below `folder`, one folder per stage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[str, pa.Table] = {}  # stage -> its rows, tensors included
        self.files: dict[str, Path] = {}  # stage -> the folder of its artifacts, named `artifacts`

    def branch(self, folder: Path) -> MemoryTables:
        """A copy with the present tables, whose stages write their artifacts below another folder."""
        copy = MemoryTables(folder)
        copy.rows, copy.files = dict(self.rows), dict(self.files)
        return copy

    def run(
        self,
        project: Project,
        name: str,
        report: Report | None = None,
        *,
        config: Any = None,
        needs: Mapping[str, Any] | None = None,
        compute: Callable[[Run[Any]], Iterator[pa.RecordBatch]] | None = None,
    ) -> pa.Table:
        """The rows of a stage, tensors included; they replace those of an earlier run. `compute`: instead of the stage's own."""
        stage, artifacts = project.stage(name), self.folder / name / "artifacts"
        artifacts.mkdir(parents=True, exist_ok=True)
        run = self.open(project, name, report)
        run.config, run.needs = config or run.config, needs or run.needs
        run.output.pending = stage.wants(run)
        found = pa.Table.from_batches((compute or stage.run)(run), stage.writes.batch)
        if stage.finish:
            run.output.stored = found
            found = pa.concat_tables([found, pa.Table.from_batches(stage.finish(run), stage.writes.batch)])
            places = {key: n for n, key in enumerate(zip(*(found[name].to_pylist() for name in stage.writes.key), strict=True))}
            found = found.take(sorted(places.values()))  # a row whose key exists replaces it
        self.rows[name], self.files[name] = found, artifacts
        return found

    def open(self, project: Project, name: str, report: Report | None = None) -> Run[Any]:
        artifacts = self.folder / name / "artifacts"
        return project.open(
            name,
            report,
            artifacts=artifacts,
            inputs={name: Input(self.files.get(name, artifacts).parent, rows=rows) for name, rows in self.rows.items()},
            write=functools.partial(_write, artifacts),
            provenance={"recipe": "in memory"},
        )


def _write(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path)
    return path
