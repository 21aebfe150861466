"""Where the pending rows of a stage are computed: in this process, or as work units on a Ray cluster."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from pipeline.project.project import Project
from stages.stage import Artifact, StageContext

Compute = Callable[[StageContext], Iterator[pa.RecordBatch | Artifact]]


def computation(project: Project, name: str) -> Compute:
    """Return the function that computes the pending rows of the stage `name`, either in this process or on a Ray cluster.
    The setting [project] `workers` chooses. The function takes the context of the run, and yields record batches and
    artifacts. Raises ValueError if Ray is chosen but not installed.

    A stage whose rows cannot be divided, or that has few of them, is computed in this process. So is a stage whose input
    files cannot be sent to workers, if the workers do not share them.
    """
    stage, settings = project.stage(name), project.config.project
    if settings.workers == "local" or not stage.divisible:
        return stage.run
    if importlib.util.find_spec("ray") is None:
        raise ValueError(f'project.workers = "{settings.workers}" needs Ray; pip install "latentmill[ray]"')

    def compute(ctx: StageContext) -> Iterator[pa.RecordBatch | Artifact]:
        if not settings.divides(stage.divisible, ctx.pending.num_rows):
            yield from stage.run(ctx)
            return
        if settings.worker_inputs == "shipped" and not stage.ships:
            ctx.say("computed here, because its input files cannot be sent to workers (project.worker_inputs)")
            yield from stage.run(ctx)
            return
        if settings.workers != "ray" and (Path.home() / ".ray" / "auth_token").exists():
            # The cluster asks for the token, but Ray's client does not look for it unless told. Elsewhere Ray decides itself.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        from pipeline import ray_workers

        yield from ray_workers.compute(project, name, ctx)

    return compute
