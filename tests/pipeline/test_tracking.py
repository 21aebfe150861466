"""Trackers: the numbers read back equal the table `train`; only what a kill left on its way is there twice."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from pipeline import tracking
from pipeline.project.project import Project
from pipeline.tracking import FILE, FOLDER, TRACKERS, Following, TrackedRun, Trackio, points, tracker_of
from tests import projects

KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(find_spec(kind) is None, reason=f"needs the extra {kind}")) for kind in TRACKERS
]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("ready") / "cats", tiny_weights, images=4)
    projects.edit(folder, "\n[samples]", "\n[train.validation]\nevery = 2\nsigmas = [0.3, 0.7]\n\n[samples]")
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings")
    return folder


@pytest.fixture
def tracked(ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("TRACKIO_DIR", "MLFLOW_TRACKING_URI", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    return projects.duplicate(ready, tmp_path / "cats")


def read_back(kind: str, folder: Path) -> Iterator[tuple[str, int, float]]:
    """Yield (metric, step, value) of every point that the tracker has of the only run, also those that are there twice."""
    run = TrackedRun("cats", Project(folder).current("train").folder.name, {}, folder / FOLDER)
    if kind == "tensorboard":
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        for file in sorted((run.folder / kind / run.id).glob("events*")):
            for event in LegacyEventFileLoader(str(file)).Load():
                yield from ((value.tag, event.step, value.simple_value) for value in event.summary.value)
    elif kind == "mlflow":
        tracker: Any = tracker_of(kind, run)
        tracker.open(0)
        for name in tracker.client.get_run(tracker.run_id).data.metrics:
            yield from ((name, each.step, each.value) for each in tracker.client.get_metric_history(tracker.run_id, name))
    elif kind == "trackio":
        code = "import json, sys, trackio; print(json.dumps(trackio.SQLiteStorage.get_logs(*sys.argv[1:])))"
        words = [sys.executable, "-c", code, run.project, run.id]  # trackio reads its folder once in a process
        environment = os.environ | {"TRACKIO_DIR": str(run.folder / kind)}
        rows = json.loads(subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout)
        yield from ((name, row["step"], value) for row in rows for name, value in row.items() if "/" in name)
    else:
        from wandb.proto import wandb_internal_pb2

        # One file for each time that the run was opened.
        for file in sorted((run.folder / "wandb").glob(f"*-{run.id}/*.wandb")):
            for record in wandb_records(file):
                found = wandb_internal_pb2.Record()
                found.ParseFromString(record)
                if found.WhichOneof("record_type") == "history":
                    items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in found.history.item}
                    step = int(items.get("_step", found.history.step.num))
                    # wandb adds metrics of its own; their names begin with an underscore.
                    yield from ((name, step, value) for name, value in items.items() if not name.startswith("_"))


HEADER, BLOCK, FRAME = 7, 32768, struct.Struct("<IHB")  # of a file of wandb: its header, a block, the frame of a piece
FULL, LAST = 1, 4  # kinds of pieces that end a record


def wandb_records(file: Path) -> Iterator[bytes]:
    """Records of a file of wandb, in the format of LevelDB's log: blocks of pieces, each with a checksum, a length and a type."""
    content = file.read_bytes()
    place, whole = HEADER, b""
    while place + FRAME.size <= len(content):
        if BLOCK - place % BLOCK < FRAME.size:  # the rest of a block that holds no frame is padding
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = FRAME.unpack_from(content, place)
        place += FRAME.size
        if not kind or place + length > len(content):
            return  # a kill cut the last record short
        whole += content[place : place + length]
        place += length
        if kind in (FULL, LAST):
            yield whole
            whole = b""


def expected(folder: Path) -> dict[tuple[str, int], float]:
    rows = projects.content(folder, "train")
    return {(name, step): value for step, values in points(rows) for name, value in values.items()}


STOPPED_AT, KILLED_AT = 2, 4
SCRIPT = f"""
import os, signal, sys
from pipeline import tracking
update = tracking.Following.update
def killed(self, **options):
    update(self, **options)
    if self.last >= {KILLED_AT}:
        os.kill(os.getpid(), signal.SIGKILL)
tracking.Following.update = killed
from pipeline.cli import main
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_not_tracked_then_stopped_then_killed_has_every_number_and_only_those_on_their_way_twice(tracked, kind):
    projects.latentmill(tracked, "train", "--only", "--set", "train.stop_after_steps=1")
    words = ["train", "--only", "--set", f'train.track="{kind}"']
    call = projects.latentmill_process  # trackio reads its folder once in a process, and wandb names its file by the second
    assert "tracked by" in call(tracked, *words, "--set", f"train.stop_after_steps={STOPPED_AT}")
    killed = [sys.executable, "-c", SCRIPT, *words, "--project", str(tracked)]
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # of this process
    done = subprocess.run(killed, cwd=projects.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    call(tracked, *words)
    call(tracked, *words)  # up to date
    found = list(read_back(kind, tracked))
    count = Counter((name, step) for name, step, _ in found)
    assert all(times == 1 if step <= STOPPED_AT else times <= 2 for (_, step), times in count.items()), count
    rows = projects.content(tracked, "train")
    wanted = {(name, step): value for step, values in points(rows) for name, value in values.items()}
    assert count.keys() == wanted.keys()
    assert {name for name, _ in wanted} == {"train/loss", "train/lr", "train/grad_norm", "validation/loss"}
    for name, step, value in found:
        assert value == pytest.approx(wanted[name, step], rel=1e-6), (name, step)


class Listed:
    """A tracker that is a list in memory."""

    name, where = "listed", "in memory"

    def __init__(self, files: Path | None = None) -> None:
        self.files = files
        self.steps: list[int] = []

    def open(self, last: int) -> int:
        return last

    def log(self, steps: Any) -> None:
        self.steps += [step for step, _ in steps]

    def close(self) -> None: ...


def writer(folder: Path, *steps: int) -> Any:
    rows = [{"step": step, "split": "train", "loss": 1.0, "lr": 0.1, "grad_norm": None} for step in steps]
    return SimpleNamespace(table=SimpleNamespace(folder=folder), version=len(rows), stored=pa.Table.from_pylist(rows))


@pytest.mark.parametrize(("settled", "again"), [(0.0, [3, 4]), (1e9, [1, 2, 3, 4])])
def test_a_resumed_run_sends_the_steps_after_the_last_that_the_tracker_has_for_sure(tmp_path, monkeypatch, settled, again):
    monkeypatch.setattr(tracking, "SETTLED", settled)
    killed = Following(first := Listed(), writer(tmp_path, 1, 2, 3))
    killed.update(unfinished=True)
    assert first.steps == [1, 2]  # rows of step 3 may be missing
    resumed = Following(second := Listed(), writer(tmp_path, 1, 2, 3, 4))
    resumed.update(unfinished=False)
    assert second.steps == again
    resumed.remember(resumed.last)
    assert json.loads((tmp_path / FILE).read_text()) == {"listed": 4}


def test_a_tracker_whose_files_were_deleted_gets_every_step_again(tmp_path):
    (tmp_path / FILE).write_text('{"listed": 2}')
    for files, sent in ((tmp_path, [3]), (None, [3]), (tmp_path / "deleted", [1, 2, 3])):
        Following(tracker := Listed(files), writer(tmp_path, 1, 2, 3)).update(unfinished=False)
        assert tracker.steps == sent


def test_a_second_project_of_a_process_does_not_write_into_the_trackio_of_the_first(tmp_path, monkeypatch):
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    monkeypatch.setattr(Trackio, "process", "")
    module = ModuleType("trackio")
    module.init = lambda **_: Listed()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setattr(Listed, "log", lambda self, values, step: None)
    one, two = (Trackio(TrackedRun(name, "abc", {}, tmp_path / name / FOLDER)) for name in ("cats", "dogs"))
    assert one.open(-1) == -1
    one.log([(1, {})])
    assert "TRACKIO_DIR" not in os.environ
    assert str(tmp_path / "dogs") in Trackio(TrackedRun("dogs", "abc", {}, tmp_path / "dogs")).where
    with pytest.raises(ValueError, match=r"trackio writes to one folder in a process.*train dogs in a process of its own"):
        two.open(-1)


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
    assert list(points(pa.Table.from_pylist(rows), after=1)) == [(2, {"train/loss": 5.0, "train/lr": 0.2})]
