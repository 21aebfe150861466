"""A run in MLflow: in the project's tracking/mlflow.db, or where MLFLOW_TRACKING_URI points."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from pipeline.tracking.points import Values
from pipeline.tracking.tracker import TrackedRun

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

TAG = "latentmill.run"  # finds the run again
BATCH = 500  # metrics of one request; MLflow takes at most 1000
LONGEST = 500  # letters of a parameter that every version of MLflow takes


class Mlflow:
    def __init__(self, client: MlflowClient, run_id: str, where: str) -> None:
        self.client, self.run_id, self.where = client, run_id, where
        names = client.get_run(run_id).data.metrics
        self._last = max((step for name in names for step in read_back(client, run_id, name)), default=-1)
        self._waiting: list[Any] = []

    def last_step(self) -> int:
        return self._last

    def log(self, step: int, values: Values) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [Metric(name, float(value), now, step) for name, value in values.items()]
        if len(self._waiting) >= BATCH:
            self._write()

    def close(self) -> None:
        # The run stays open in MLflow: a later command may continue it.
        self._write()

    def _write(self) -> None:
        if self._waiting:
            # The metrics of a step are in one request, so MLflow has all of them or none.
            self.client.log_batch(self.run_id, metrics=self._waiting)
            self._waiting = []


def open_run(run: TrackedRun) -> Mlflow:
    from mlflow.tracking import MlflowClient

    local = f"sqlite:///{(run.folder / 'mlflow.db').absolute()}"
    uri = os.environ.get("MLFLOW_TRACKING_URI") or local
    run.folder.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(run.project)
    artifacts = (run.folder / "mlflow-artifacts").absolute().as_uri() if uri == local else None
    number = experiment.experiment_id if experiment else client.create_experiment(run.project, artifact_location=artifacts)
    found = client.search_runs([number], f"tags.`{TAG}` = '{run.id}'", max_results=1)
    if found:
        return Mlflow(client, found[0].info.run_id, f"mlflow ui --backend-store-uri {uri}")
    created = client.create_run(number, run_name=run.id, tags={TAG: run.id}).info.run_id
    for key, value in run.settings.items():
        client.log_param(created, key, str(value)[:LONGEST])
    return Mlflow(client, created, f"mlflow ui --backend-store-uri {uri}")


def read_back(client: MlflowClient, run_id: str, name: str) -> dict[int, float]:
    """step -> value."""
    history = client.get_metric_history(run_id, name)
    found = {each.step: each.value for each in history}
    assert len(found) == len(history), f"{name} has a step twice"
    return found
