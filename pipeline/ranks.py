"""What a rank of data-parallel training other than rank 0 runs: it computes its share and writes nothing."""

from __future__ import annotations

import signal
import tempfile
import threading
from pathlib import Path

from pipeline.project import runs
from pipeline.project.project import Project
from pipeline.project.recipe import recipe_id
from stages.stage import Stage
from stages.tuner.ranks import launched_rank


def following() -> bool:
    """True in a rank other than 0."""
    return bool(launched_rank())


def follow(project: Project, stage: Stage) -> None:
    """Compute this rank's share; rank 0 writes the results and reports. Raises ValueError if `stage` does not train."""
    if not runs.trains(stage.writes):
        raise ValueError(f"{stage.name}: only a stage that trains divides its work among ranks; run it without `launch`")
    # Ctrl-C reaches every rank of a terminal. Rank 0 decides what becomes of it.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        provenance = {"recipe": recipe_id(project.recipe(stage.name))}
        run = project.open(stage.name, artifacts=Path(folder), provenance=provenance)
        for _ in stage.run(run):
            pass
