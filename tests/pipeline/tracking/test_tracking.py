"""Trackers: the numbers read back equal the table `train`, and after a kill no step is there twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.project.project import Project
from pipeline.tracking.points import points
from pipeline.tracking.tracker import FOLDER, PACKAGES, TrackedRun, open_tracker
from tests import projects

KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}"))
    for kind, package in PACKAGES.items()
]


@pytest.fixture
def tracked(tmp_path: Path, tiny_weights: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose stages before training are built, with held-out images."""
    for name in ("TRACKIO_DIR", "MLFLOW_TRACKING_URI", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    folder = projects.make(tmp_path / "cats", tiny_weights, images=4)
    projects.edit(folder, "\n[samples]", "\n[train.validation]\nevery = 2\n\n[samples]")
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings")
    return folder


def read_back(kind: str, folder: Path) -> Iterator[tuple[str, int, float]]:
    """Yield (metric, step, value) of every point that the tracker has of the only run, also those that are there twice."""
    run = TrackedRun("cats", Project(folder).current("train").folder.name, {}, folder / FOLDER)
    if kind == "tensorboard":
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        for file in sorted((run.folder / kind / run.id).glob("events*")):
            for event in LegacyEventFileLoader(str(file)).Load():
                yield from ((value.tag, event.step, value.simple_value) for value in event.summary.value)
    elif kind == "mlflow":
        tracker: Any = open_tracker(kind, run)
        for name in tracker.client.get_run(tracker.run_id).data.metrics:
            yield from ((name, each.step, each.value) for each in tracker.client.get_metric_history(tracker.run_id, name))
    elif kind == "trackio":
        code = "import json, sys, trackio; print(json.dumps(trackio.SQLiteStorage.get_logs(*sys.argv[1:])))"
        words = [sys.executable, "-c", code, run.project, run.id]  # trackio reads its folder once in a process
        environment = os.environ | {"TRACKIO_DIR": str(run.folder / kind)}
        rows = json.loads(subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout)
        yield from ((name, row["step"], value) for row in rows for name, value in row.items() if "/" in name)
    else:
        from pipeline.tracking.in_wandb import read_back as of_wandb

        for step, values in of_wandb(run):
            yield from ((name, step, value) for name, value in values.items())


def expected(folder: Path) -> dict[tuple[str, int], float]:
    rows = projects.content(folder, "train")
    return {(name, step): value for step, values in points(rows) for name, value in values.items()}


def check_equal(kind: str, folder: Path) -> None:
    found = list(read_back(kind, folder))
    assert max(Counter((name, step) for name, step, _ in found).values()) == 1, "a step is there twice"
    wanted = expected(folder)
    assert {(name, step) for name, step, _ in found} == wanted.keys()
    for name, step, value in found:
        assert value == pytest.approx(wanted[name, step], rel=1e-6), (name, step)


def train(folder: Path, kind: str, *words: str, code: int = 0) -> str:
    return projects.latentmill_process(folder, "train", "--only", "--set", f'train.track="{kind}"', *words, code=code)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_a_run_that_was_stopped_and_resumed_are_those_of_the_table_once_each(tracked, kind):
    assert "tracked by" in train(tracked, kind, "--set", "train.stop_after_steps=3")
    train(tracked, kind)
    train(tracked, kind)  # up to date
    check_equal(kind, tracked)
    assert {name for name, _ in expected(tracked)} == {"train/loss", "train/lr", "train/grad_norm", "validation/loss"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_not_tracked_at_first_is_completed_later(tracked, kind):
    projects.latentmill_process(tracked, "train", "--only")
    train(tracked, kind)
    check_equal(kind, tracked)


KILLED_AT = 3
SCRIPT = """
import os, signal, sys
from pipeline.tracking import tracker
catch_up = tracker.catch_up
def killed(*arguments, **options):
    last = catch_up(*arguments, **options)
    if last >= {step}:
        {close}
        os.kill(os.getpid(), signal.SIGKILL)
    return last
tracker.catch_up = killed
from pipeline.cli import main
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("written", [True, False], ids=["after the tracker has written", "before"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_kill_and_a_resume_no_step_is_doubled(tracked, kind, written):
    script = SCRIPT.format(step=KILLED_AT, close="arguments[0].close()" if written else "pass")
    words = ["train", "--only", "--project", str(tracked), "--set", f'train.track="{kind}"']
    done = subprocess.run([sys.executable, "-c", script, *words], cwd=projects.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    train(tracked, kind)
    check_equal(kind, tracked)


def test_points_are_means_of_complete_measurements():
    def row(step: int, split: str, loss: float) -> dict[str, Any]:
        return {"step": step, "split": split, "loss": loss, "lr": 0.1 * step, "grad_norm": None}

    rows = [
        row(0, "validation", 4.0),
        row(0, "validation", 2.0),
        row(1, "train", 1.0),
        row(1, "train", 3.0),
        row(2, "train", 5.0),
    ]
    rows.append(row(2, "validation", 9.0))  # one of two
    found = dict(points(pa.Table.from_pylist(rows)))
    assert found == {
        0: {"validation/loss": 3.0},
        1: {"train/loss": 2.0, "train/lr": 0.1},
        2: {"train/loss": 5.0, "train/lr": 0.2},
    }
    assert list(dict(points(pa.Table.from_pylist(rows), after=1))) == [2]


def test_a_missing_package_is_one_line_that_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.tracking.tracker.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'track = "wandb" needs the package wandb: pip install "latentmill\[wandb\]"'):
        open_tracker("wandb", TrackedRun("cats", "abc", {}, tmp_path))


@pytest.mark.slow
def test_an_unknown_tracker_is_refused_with_those_that_exist(tracked):
    said = train(tracked, "tensorbord", code=2)
    assert "tensorboard" in said and "trackio" in said
