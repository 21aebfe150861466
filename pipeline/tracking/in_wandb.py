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
    def __init__(self, run: TrackedRun, mode: str, where: str) -> None:
        self.run, self.mode, self.where = run, mode, where
        self._open: Any = None

    def last_step(self) -> int:
        last = max((step for step, _ in read_back(self.run)), default=-1)
        if self.mode != "online":
            return last
        # The server may have more than the files of this project. Its `step` is that of the next row.
        self._begin()
        return max(last, int(self._open.step) - 1)

    def log(self, step: int, values: Values) -> None:
        self._begin()
        self._open.log(values, step=step)

    def close(self) -> None:
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
    mode = os.environ.get("WANDB_MODE", "offline")
    where = "online" if mode == "online" else f"wandb sync {run.folder / 'wandb'}/*{run.id} uploads it"
    return Wandb(run, mode, where)


def read_back(run: TrackedRun) -> Iterator[tuple[int, Values]]:
    """(step, values) from wandb's local files."""
    from wandb.proto import wandb_internal_pb2

    # One file for each time that the run was opened.
    for file in sorted((run.folder / "wandb").glob(f"*-{run.id}/*.wandb")):
        for record in _records(file):
            found = wandb_internal_pb2.Record()
            found.ParseFromString(record)
            if found.WhichOneof("record_type") == "history":
                items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in found.history.item}
                step = int(items.get("_step", found.history.step.num))
                # wandb adds metrics of its own; their names begin with an underscore.
                yield step, {name: value for name, value in items.items() if not name.startswith("_")}


def _records(file: Path) -> Iterator[bytes]:
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
            # A kill cut the last record short.
            return
        whole += content[place : place + length]
        place += length
        if kind in (FULL, LAST):
            yield whole
            whole = b""
