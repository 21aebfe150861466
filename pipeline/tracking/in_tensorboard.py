"""A run as event files of TensorBoard, one folder per run in the project. A resumed run adds a file."""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.tracking.points import Values
from pipeline.tracking.tracker import TrackedRun


class TensorBoard:
    def __init__(self, folder: Path, where: str) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.folder, self.where = folder, where
        self._last = max((step for steps in read_back(folder).values() for step in steps), default=-1)
        self._writer = EventFileWriter(str(folder), flush_secs=10)

    def last_step(self) -> int:
        return self._last

    def log(self, step: int, values: Values) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def close(self) -> None:
        self._writer.close()


def open_run(run: TrackedRun) -> TensorBoard:
    root = run.folder / "tensorboard"
    return TensorBoard(root / run.id, f"tensorboard --logdir {root}")


def read_back(folder: Path) -> dict[str, dict[int, float]]:
    """metric -> step -> value. If a kill cut a record short, the rest of its file is ignored."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: dict[str, dict[int, float]] = {}
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found
