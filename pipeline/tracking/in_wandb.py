"""A run in Weights & Biases. It is written to the project alone, unless WANDB_MODE=online asks for more."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.tracking.points import Values
from pipeline.tracking.tracker import TrackedRun

HEADER, BLOCK, FRAME = 7, 32768, struct.Struct("<IHB")  # of a file of wandb: its header, a block, the frame of a piece
FULL, LAST = 1, 4  # kinds of pieces that end a record


class Wandb:
    """A run in Weights & Biases. It is opened when the first step is written."""

    def __init__(self, run: TrackedRun, mode: str, where: str) -> None:
        self.run, self.mode, self.where = run, mode, where
        self._open: Any = None

    def last_step(self) -> int:
        """Return the last step that the run has: on the server if the run is online, otherwise in the project's files.
        Return -1 if it has none.
        """
        last = max((step for step, _ in read_back(self.run)), default=-1)
        if self.mode != "online":
            return last
        self._begin()
        return max(last, int(self._open.step) - 1)

    def log(self, step: int, values: Values) -> None:
        """Write the values of one training step. `step` is the number of the step. `values` maps the name of a metric to
        its value.
        """
        self._begin()
        self._open.log(values, step=step)

    def close(self) -> None:
        """Write all buffered values."""
        if self._open is not None:
            self._open.finish()
            self._open = None

    def _begin(self) -> None:
        import wandb

        if self._open is None:
            self.run.folder.mkdir(parents=True, exist_ok=True)
            quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True, disable_code=True)
            self._open = wandb.init(
                project=self.run.project,
                id=self.run.id,
                config=self.run.settings,
                dir=str(self.run.folder),
                mode=self.mode,
                resume="allow",
                settings=quiet,
            )


def open_run(run: TrackedRun) -> Wandb:
    """Return the run `run` in Weights & Biases. By default, its data is only written to the project's folder
    tracking/wandb. The environment variable WANDB_MODE can choose another mode, such as "online".
    """
    mode = os.environ.get("WANDB_MODE", "offline")
    where = "online" if mode == "online" else f"wandb sync {run.folder / 'wandb'}/*{run.id} uploads it"
    return Wandb(run, mode, where)


def read_back(run: TrackedRun) -> Iterator[tuple[int, Values]]:
    """Yield (step, values) for every training step of a run, as read from the local files of wandb. `run` is the
    training run. `step` is the number of the step. `values` maps the name of a metric to its value.

    wandb writes a new file into the folder tracking/wandb of the project each time the run is opened. The files are
    read one after another, sorted by path. The steps of a file come in the order in which they were written. If the
    process was killed while it wrote a record, the file ends with an incomplete record. This record is ignored. Metrics
    whose names begin with an underscore are left out, because wandb itself adds them.
    """
    from wandb.proto import wandb_internal_pb2

    for file in sorted((run.folder / "wandb").glob(f"*-{run.id}/*.wandb")):
        for record in _records(file):
            found = wandb_internal_pb2.Record()
            found.ParseFromString(record)
            if found.WhichOneof("record_type") == "history":
                items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in found.history.item}
                step = int(items.get("_step", found.history.step.num))
                yield step, {name: value for name, value in items.items() if not name.startswith("_")}


def _records(file: Path) -> Iterator[bytes]:
    """Yield the records of a file that wandb wrote. The format is that of LevelDB's log: blocks of record pieces, each with
    a checksum, a length and a type.
    """
    content = file.read_bytes()
    place, whole = HEADER, b""
    while place + FRAME.size <= len(content):
        if BLOCK - place % BLOCK < FRAME.size:  # the rest of a block that holds no frame is padding
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = FRAME.unpack_from(content, place)
        place += FRAME.size
        if not kind or place + length > len(content):
            return
        whole += content[place : place + length]
        place += length
        if kind in (FULL, LAST):
            yield whole
            whole = b""
