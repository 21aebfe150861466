"""Where the pending rows of a stage are computed: in this process, or as work units on a Ray cluster."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.project.project import Project
from stages.run import Run
from stages.stage import Artifact

Compute = Callable[[Run[Any]], Iterator[pa.RecordBatch | Artifact]]


def computation(project: Project, name: str) -> Compute:
    """How pending rows are computed: here or on Ray, as [project] `workers` says. Raises ValueError if Ray is not installed."""
    stage, settings = project.stage(name), project.config.project
    if settings.workers == "local" or not stage.divisible:
        return stage.run
    if importlib.util.find_spec("ray") is None:
        raise ValueError(f'project.workers = "{settings.workers}" needs Ray; pip install "latentmill[ray]"')

    def compute(run: Run[Any]) -> Iterator[pa.RecordBatch | Artifact]:
        if not settings.divides(stage.divisible, run.output.pending.num_rows):
            yield from stage.run(run)
            return
        # The workers do not share the files, and the stage's cannot be sent.
        if settings.worker_inputs == "shipped" and not stage.ships:
            run.report.say("computed here, because its input files cannot be sent to workers (project.worker_inputs)")
            yield from stage.run(run)
            return
        if settings.workers != "ray" and (Path.home() / ".ray" / "auth_token").exists():
            # The cluster asks for the token, but Ray's client does not look for it unless told. Elsewhere Ray decides itself.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        from pipeline import ray_workers

        yield from ray_workers.compute(project, name, run)

    return compute
