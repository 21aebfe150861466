"""Choosing a tracker, and bringing it up to date with the table of a training run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from pipeline.project.project import Project
from pipeline.project.run import flatten
from pipeline.project.runs import present_settings
from pipeline.store.writer import Writer
from pipeline.tracking.points import Values, points

FOLDER = "tracking"  # in the project
PACKAGES = {"tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb", "mlflow": "mlflow"}
Say = Callable[[str], None]
Computed = Iterator[Any]  # batches and artifacts of a stage


@dataclass(frozen=True)
class TrackedRun:
    """The facts about a training run that an experiment tracker, such as MLflow, needs. `project` is the name of the
    project. `id` identifies the run. It is 12 hex digits: a hash of all that decides what the run computes, such as its
    settings and inputs. `settings` maps dotted keys, such as "train.lr", to values. `folder` is the folder "tracking"
    of the project, in which local trackers keep their files.

    `id` is also the name of the folder with the table of the run.
    """

    project: str
    id: str
    settings: dict[str, Any]
    folder: Path


class Tracker(Protocol):
    """An object that writes the metrics of one training run to an experiment tracker. An experiment tracker is a
    program that shows the metrics of training runs, such as MLflow. Each of these programs has a module in
    `pipeline.tracking`, such as `in_mlflow`. The function `open_run(run)` of the module returns a `Tracker` object for
    the training run `run`.
    """

    where: str  # for the user: how to look at it

    def last_step(self) -> int:
        """Return the last step that the tracker has completely, or -1."""

    def log(self, step: int, values: Values) -> None:
        """Write the values of one training step to the tracker. `step` is the number of the step. `values` maps the name of
        a metric to its value.
        """

    def close(self) -> None:
        """Write all buffered values to the tracker, and close the connection."""


def open_tracker(kind: str, run: TrackedRun) -> Tracker:
    """Open `run` in the tracker `kind`, a key of PACKAGES. Raises ValueError if its package is not installed."""
    if find_spec(PACKAGES[kind]) is None:
        raise ValueError(f'[train] track = "{kind}" needs the package {PACKAGES[kind]}: pip install "latentmill[{kind}]"')
    tracker: Tracker = import_module(f"pipeline.tracking.in_{kind}").open_run(run)
    return tracker


def catch_up(tracker: Tracker, rows: pa.Table, last: int, *, unfinished: bool = False) -> int:
    """Write the steps of a training table to `tracker`, beginning after the step `last`. `rows` are the rows of the
    table. If `unfinished` is True, the newest step is left for later, because some of its rows may be missing. Return
    the last step that was written, or `last` if no step was written.
    """
    found = list(points(rows, last))
    for step, values in found[:-1] if unfinished else found:
        tracker.log(step, values)
        last = step
    return last


class Following:
    """Copies the metrics of a training stage to an experiment tracker while the stage runs. `tracker` is the training
    run in an experiment tracker, such as MLflow. `writer` writes the rows of the stage to its table. A `Following`
    object `follow` is called like a function: `follow(batches)` yields each item of `batches`, the output of the stage,
    unchanged. The caller stores each item with `writer`. When the caller asks for the next item, `follow` first sends
    the newly stored training steps to `tracker`.

    A typical use is `for batch in follow(batches): writer.append(batch)`. The newest step waits until a newer step is
    stored or `update(unfinished=False)` is called, because some of its rows may be missing.
    """

    def __init__(self, tracker: Tracker, writer: Writer) -> None:
        self.tracker, self.writer = tracker, writer
        self.version = -1
        self.last = tracker.last_step()

    def update(self, *, unfinished: bool) -> None:
        """Write the committed steps that the tracker lacks. If `unfinished` is True, the newest step is left for later,
        because some of its rows may be missing.
        """
        if self.writer.version != self.version or not unfinished:
            self.version = self.writer.version
            self.last = catch_up(self.tracker, self.writer.stored, self.last, unfinished=unfinished)

    def __call__(self, batches: Computed) -> Computed:
        """Yield the items of `batches` unchanged. After each one, write newly committed steps to the tracker."""
        try:
            for each in batches:
                yield each
                self.update(unfinished=True)
        finally:
            if hasattr(batches, "close"):
                batches.close()


@contextmanager
def tracked(project: Project, stage: str, writer: Writer, say: Say) -> Iterator[Callable[[Computed], Computed]]:
    """Copy the metrics of a training stage to an experiment tracker during a `with` block. `project` is the opened
    project folder. `stage` is the name of the stage. `writer` writes the rows of the stage to its table. `say(line)`
    shows a line to the user. `with tracked(...) as follow` gives the block a function `follow`. `follow(batches)`
    yields each item of `batches`, the output of the stage, unchanged. The block stores each item with `writer`. When
    the block asks for the next item, `follow` first copies the newly stored training steps to the tracker.

    A typical block is `for batch in follow(batches): writer.append(batch)`. The setting [train] `track` chooses the
    tracker. If it is empty, nothing is copied. At the end, the tracker has every committed step, also after an error.
    Raises ValueError if the tracker's package is not installed.
    """
    kind = getattr(project.config.sections[stage], "track", "")
    if not kind:
        yield lambda batches: batches
        return
    settings = flatten({name: each for name, each in present_settings(project, stage).items() if name == stage})
    run = TrackedRun(project.name, writer.table.folder.name, settings, project.path / FOLDER)
    tracker = open_tracker(kind, run)
    say(f"tracked by {kind}: {tracker.where}")
    follow = Following(tracker, writer)
    try:
        follow.update(unfinished=True)
        yield follow
    finally:
        follow.update(unfinished=False)
        tracker.close()
