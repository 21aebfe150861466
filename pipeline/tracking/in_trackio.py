"""A run in trackio: in the project's tracking/trackio, or where TRACKIO_DIR points. Opened when the first step is written."""

from __future__ import annotations

import os
from typing import Any

from pipeline.tracking.points import Values
from pipeline.tracking.tracker import TrackedRun


class Trackio:
    def __init__(self, run: TrackedRun, where: str) -> None:
        self.run, self.where = run, where
        self._open: Any = None

    def last_step(self) -> int:
        return max((row["step"] for row in read_back(self.run)), default=-1)

    def log(self, step: int, values: Values) -> None:
        import trackio

        if self._open is None:
            settings = {key: str(value) for key, value in self.run.settings.items()}
            still = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
            self._open = trackio.init(project=self.run.project, name=self.run.id, config=settings, resume="allow", **still)
        self._open.log(values, step=step)

    def close(self) -> None:
        if self._open is not None:
            self._open.finish()
            self._open = None


def open_run(run: TrackedRun) -> Trackio:
    folder = os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))
    return Trackio(run, f"TRACKIO_DIR={folder} trackio show --project {run.project}")


def read_back(run: TrackedRun) -> list[dict[str, Any]]:
    """Rows with "step" and the metrics by name."""
    from trackio.sqlite_storage import SQLiteStorage

    rows: list[dict[str, Any]] = SQLiteStorage.get_logs(run.project, run.id)
    return rows
