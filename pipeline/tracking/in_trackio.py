"""A run in trackio, which keeps it in a database in the project."""

from __future__ import annotations

import os
from typing import Any

from pipeline.tracking.points import Values
from pipeline.tracking.tracker import TrackedRun


class Trackio:
    """A run in trackio. It is opened when the first step is written."""

    def __init__(self, run: TrackedRun, where: str) -> None:
        self.run, self.where = run, where
        self._open: Any = None

    def last_step(self) -> int:
        """Return the last step that trackio has, or -1."""
        return max((row["step"] for row in read_back(self.run)), default=-1)

    def log(self, step: int, values: Values) -> None:
        """Write the values of one training step. `step` is the number of the step. `values` maps the name of a metric to
        its value.
        """
        import trackio

        if self._open is None:
            settings = {key: str(value) for key, value in self.run.settings.items()}
            still = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
            self._open = trackio.init(project=self.run.project, name=self.run.id, config=settings, resume="allow", **still)
        self._open.log(values, step=step)

    def close(self) -> None:
        """Write all buffered values, and wait until they are in the database."""
        if self._open is not None:
            self._open.finish()
            self._open = None


def open_run(run: TrackedRun) -> Trackio:
    """Return the run `run` in trackio. Its data lies in the project's folder tracking/trackio, or in the folder that
    the environment variable TRACKIO_DIR names.
    """
    folder = os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))
    return Trackio(run, f"TRACKIO_DIR={folder} trackio show --project {run.project}")


def read_back(run: TrackedRun) -> list[dict[str, Any]]:
    """Return the rows that trackio has of a run: "step", and the metrics by name."""
    from trackio.sqlite_storage import SQLiteStorage

    rows: list[dict[str, Any]] = SQLiteStorage.get_logs(run.project, run.id)
    return rows
