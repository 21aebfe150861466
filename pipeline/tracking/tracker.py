"""Choosing a tracker, and bringing it up to date with the table of a training run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from pipeline.project.project import Project
from pipeline.project.runs import flatten, present_settings
from pipeline.store.table import Writer
from pipeline.tracking.points import Values, points

FOLDER = "tracking"  # in the project
PACKAGES = {"tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb", "mlflow": "mlflow"}
Say = Callable[[str], None]


@dataclass(frozen=True)
class TrackedRun:
    project: str  # name
    id: str  # recipe: the name of the run's folder, 12 hex digits
    settings: dict[str, Any]  # by dotted keys, such as "train.lr"
    folder: Path  # where local trackers keep their files: tracking/ of the project


class Tracker(Protocol):
    """What `open_run(run)` of the modules `in_*` returns."""

    where: str  # for the user: how to look at it

    def last_step(self) -> int:
        """The last step that the tracker has completely, or -1."""

    def log(self, step: int, values: Values) -> None:
        """Write the values of one training step."""

    def close(self) -> None:
        """Write what is buffered."""


def open_tracker(kind: str, run: TrackedRun) -> Tracker:
    """`kind` is a key of PACKAGES. Raises ValueError if its package is not installed."""
    if find_spec(PACKAGES[kind]) is None:
        raise ValueError(f'[train] track = "{kind}" needs the package {PACKAGES[kind]}: pip install "latentmill[{kind}]"')
    tracker: Tracker = import_module(f"pipeline.tracking.in_{kind}").open_run(run)
    return tracker


def catch_up(tracker: Tracker, rows: pa.Table, last: int, *, unfinished: bool = False) -> int:
    """Write the steps of a training table after the step `last`, and return the last one written."""
    found = list(points(rows, last))
    # Rows of the newest step may still be missing while the stage runs.
    for step, values in found[:-1] if unfinished else found:
        tracker.log(step, values)
        last = step
    return last


class Following:
    """Sends the steps that `writer` has committed to the tracker."""

    def __init__(self, tracker: Tracker, writer: Writer) -> None:
        self.tracker, self.writer = tracker, writer
        self.version = -1
        self.last = tracker.last_step()

    def update(self, *, unfinished: bool) -> None:
        if self.writer.version != self.version or not unfinished:
            self.version = self.writer.version
            self.last = catch_up(self.tracker, self.writer.stored, self.last, unfinished=unfinished)


@contextmanager
def tracked(project: Project, stage: str, writer: Writer, say: Say) -> Iterator[Callable[[], None]]:
    """The block gets a function that sends what is committed to the tracker of [train] `track`. At the end no step is missing."""
    kind = getattr(project.config.sections[stage], "track", "")
    if not kind:
        yield lambda: None
        return
    settings = flatten({name: each for name, each in present_settings(project, stage).items() if name == stage})
    run = TrackedRun(project.name, writer.table.folder.name, settings, project.path / FOLDER)
    tracker = open_tracker(kind, run)
    say(f"tracked by {kind}: {tracker.where}")
    follow = Following(tracker, writer)
    try:
        follow.update(unfinished=True)
        yield functools.partial(follow.update, unfinished=True)
    finally:
        follow.update(unfinished=False)
        tracker.close()
