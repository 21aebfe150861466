"""Experiment trackers: copies of the numbers of a training run in TensorBoard, trackio, Weights & Biases or MLflow.

The table `train` is the truth. A tracker gets the steps that the table has and the tracker lacks, also those of a time when the
run was not tracked. The packages are extras, imported only when a run is tracked.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from pipeline.project.project import Project
from pipeline.project.runs import by_step, flatten, present_settings
from pipeline.store.disk import atomic_write
from pipeline.store.table import Writer
from stages.untrusted import read_json

FOLDER = "tracking"  # in the project
FILE = "tracked.json"  # in the run's folder: tracker -> the last step that it has for sure
# Seconds after which a tracker has written what it was given. wandb and trackio write in the background and cannot be asked to
# finish, so steps of the last minute before a kill are logged again, and a tracker may then have them twice.
SETTLED = 60.0
ONCE = ("lr", "grad_norm")  # columns with one value per step

Values = dict[str, float]  # metric -> value
Step = tuple[int, Values]


@dataclass(frozen=True)
class TrackedRun:
    project: str  # name
    id: str  # recipe: the name of the run's folder, 12 hex digits
    settings: dict[str, Any]  # by dotted keys, such as "train.lr"
    folder: Path  # where local trackers keep their files: tracking/ of the project


@contextmanager
def tracked(project: Project, stage: str, writer: Writer, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """The block gets a function that sends what is committed to the tracker of [train] `track`. At the end no step is missing."""
    kind = getattr(project.config.sections[stage], "track", "")
    if not kind:
        yield lambda: None
        return
    settings = flatten({name: each for name, each in present_settings(project, stage).items() if name == stage})
    tracker = tracker_of(kind, TrackedRun(project.name, writer.table.folder.name, settings, project.path / FOLDER))
    say(f"tracked by {kind}: {tracker.where}")
    follow = Following(tracker, writer)
    try:
        follow.update(unfinished=True)
        yield functools.partial(follow.update, unfinished=True)
    finally:
        follow.update(unfinished=False)
        tracker.close()
        follow.remember(follow.last)


def tracker_of(kind: str, run: TrackedRun) -> Tracker:
    """Raises ValueError if the package of the tracker is not installed."""
    if find_spec(kind) is None:
        raise ValueError(f'[train] track = "{kind}" needs the package {kind}: pip install "latentmill[{kind}]"')
    return TRACKERS[kind](run)


class Following:
    def __init__(self, tracker: Tracker, writer: Writer) -> None:
        self.tracker, self.writer = tracker, writer
        self.version = -1
        self.known: dict[str, int] = {}
        with suppress(OSError, ValueError, TypeError):  # without the file, or with a damaged one, all steps are logged again
            self.known |= {str(name): int(step) for name, step in dict(read_json(writer.table.folder / FILE)).items()}
        gone = tracker.files is not None and not tracker.files.exists()  # the user has deleted them
        self.last = tracker.open(-1 if gone else self.known.get(tracker.name, -1))
        self.given: list[tuple[float, int]] = []  # (when, last step) of what may still be on its way

    def update(self, *, unfinished: bool) -> None:
        if self.writer.version == self.version and unfinished:
            return
        self.version = self.writer.version
        found = list(points(self.writer.stored, self.last))
        # Rows of the newest step may still be missing while the stage runs.
        if found := found[:-1] if unfinished else found:
            self.tracker.log(found)
            self.last = found[-1][0]
            self.given.append((time.monotonic(), self.last))
        settled = [step for when, step in self.given if when <= time.monotonic() - SETTLED]
        if settled:
            self.given = self.given[len(settled) :]
            self.remember(settled[-1])

    def remember(self, step: int) -> None:
        if self.known.get(self.tracker.name) != step >= 0:
            self.known[self.tracker.name] = step
            with atomic_write(self.writer.table.folder / FILE) as temporary:
                temporary.write_text(json.dumps(self.known), encoding="utf-8")


def points(rows: pa.Table, after: int = -1) -> Iterator[Step]:
    """For each step after `after`: mean losses of training and held-out samples, lr, grad_norm."""
    found: dict[int, Values] = {}
    for each in by_step(rows, "train", *(name for name in ONCE if name in rows.column_names)).to_pylist():
        step = each.pop("step")
        found[step] = {f"train/{name}": value for name, value in each.items() if value is not None}
    for each in by_step(rows, "validation").to_pylist():
        found.setdefault(each["step"], {})["validation/loss"] = each["loss"]
    yield from sorted((step, values) for step, values in found.items() if step > after)


class Tracker:
    name: str  # in FILE
    where: str  # for the user: how to look at it
    files: Path | None  # where it keeps the run; None: on a server
    session: Any = None  # the run in the client of trackio or wandb, once it has begun

    def open(self, last: int) -> int:
        """Find or begin the run, of which `last` was the last step. Returns the last step that it has, or -1."""
        return last

    def log(self, steps: Sequence[Step]) -> None:
        for step, values in steps:
            self.session.log(values, step=step)

    def close(self) -> None:
        if self.session is not None:
            self.session.finish()


class TensorBoard(Tracker):
    """Event files, one folder per run in the project. A resumed run adds a file."""

    def __init__(self, run: TrackedRun) -> None:
        root = run.folder / "tensorboard"
        self.name, self.where, self.files = "tensorboard", f"tensorboard --logdir {root}", root / run.id

    def open(self, last: int) -> int:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self.files), flush_secs=10)
        return last

    def log(self, steps: Sequence[Step]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for step, values in steps:
            scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def close(self) -> None:
        self._writer.close()


class Trackio(Tracker):
    """In the project's tracking/trackio, or where TRACKIO_DIR points. Opened when the first step is written."""

    process: ClassVar[str] = ""  # the folder of this process: trackio reads TRACKIO_DIR once, when it is imported

    def __init__(self, run: TrackedRun) -> None:
        asked = os.environ.get("TRACKIO_DIR")
        folder = asked or str(run.folder / "trackio")
        self.run, self.folder, self.files = run, folder, Path(folder)
        self.name = f"trackio {asked or ''}".strip()
        self.where = f"TRACKIO_DIR={shlex.quote(folder)} trackio show --project {shlex.quote(run.project)}"

    def open(self, last: int) -> int:
        if Trackio.process not in ("", self.folder):
            raise ValueError(
                f"trackio writes to one folder in a process, here {Trackio.process}: "
                f"train {self.run.project} in a process of its own, or set TRACKIO_DIR for both"
            )
        return last

    def log(self, steps: Sequence[Step]) -> None:
        if self.session is None:
            settings = {key: str(value) for key, value in self.run.settings.items()}
            still = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
            before = os.environ.get("TRACKIO_DIR")
            os.environ["TRACKIO_DIR"] = Trackio.process = self.folder
            try:
                import trackio

                self.session = trackio.init(project=self.run.project, name=self.run.id, config=settings, resume="allow", **still)
            finally:
                # Not for ever: another project of this process would take the folder for its user's choice.
                if before is None:
                    del os.environ["TRACKIO_DIR"]
        super().log(steps)


class Wandb(Tracker):
    """Written to the project alone, unless WANDB_MODE=online asks for more."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.mode: Any = os.environ.get("WANDB_MODE", "offline")  # wandb refuses what it does not know
        online = self.mode == "online"
        self.name, self.files = "wandb online" if online else "wandb", None if online else run.folder / "wandb"
        self.where = "online" if online else f"wandb sync {run.folder / 'wandb'}/*{run.id} uploads it"

    def open(self, last: int) -> int:
        if self.mode != "online":
            return last
        self._begin()
        return int(self.session.step) - 1  # the server knows; its `step` is that of the next row

    def log(self, steps: Sequence[Step]) -> None:
        self._begin()
        super().log(steps)

    def _begin(self) -> None:
        import wandb

        if self.session is None:
            self.run.folder.mkdir(parents=True, exist_ok=True)
            quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True, disable_code=True)
            self.session = wandb.init(
                project=self.run.project,
                id=self.run.id,
                config=self.run.settings,
                dir=str(self.run.folder),
                mode=self.mode,
                resume="allow",
                settings=quiet,
            )


class Mlflow(Tracker):
    """In the project's tracking/mlflow.db, or where MLFLOW_TRACKING_URI points. The run stays open for a later command."""

    tag = "latentmill.run"  # finds the run again
    most = 1000  # metrics of one request
    longest = 500  # letters of a parameter that every version of MLflow takes

    def __init__(self, run: TrackedRun) -> None:
        asked = os.environ.get("MLFLOW_TRACKING_URI")
        self.run, self.files = run, None if asked else run.folder / "mlflow.db"
        self.uri = asked or f"sqlite:///{(run.folder / 'mlflow.db').absolute()}"
        self.name, self.where = f"mlflow {asked or ''}".strip(), f"mlflow ui --backend-store-uri {self.uri}"

    def open(self, last: int) -> int:
        from mlflow.tracking import MlflowClient

        run = self.run
        run.folder.mkdir(parents=True, exist_ok=True)
        self.client = MlflowClient(tracking_uri=self.uri)
        experiment = self.client.get_experiment_by_name(run.project)
        artifacts = (run.folder / "mlflow-artifacts").absolute().as_uri() if self.files else None
        number = (
            experiment.experiment_id if experiment else self.client.create_experiment(run.project, artifact_location=artifacts)
        )
        found = self.client.search_runs([number], f"tags.`{self.tag}` = '{run.id}'", max_results=1)
        if found:
            self.run_id = found[0].info.run_id
            return last
        self.run_id = self.client.create_run(number, run_name=run.id, tags={self.tag: run.id}).info.run_id
        for key, value in run.settings.items():
            self.client.log_param(self.run_id, key, str(value)[: self.longest])
        return -1

    def log(self, steps: Sequence[Step]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, step) for step, values in steps for name, value in values.items()]
        for start in range(0, len(metrics), self.most):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + self.most])


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": Wandb,
    "mlflow": Mlflow,
}
