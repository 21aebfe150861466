"""Control of a running training: files in its artifacts folder, interrupts, and limits on steps or minutes.

    stop         write a checkpoint and end the run; the same command goes on
    checkpoint   write a checkpoint and go on
    pause        write a checkpoint and wait, with everything in memory, until the file is gone

The files are looked for after each step; `stop` also before the first one and between the micro-batches of a
measurement, which the next command then repeats. `stop` and `checkpoint` are removed when they are seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stages.run import Run
from stages.tuner.config import TrainingConfig

STOP, CHECKPOINT, PAUSE = "stop", "checkpoint", "pause"
POLL_SECONDS = 0.2  # between two checks whether the file `pause` exists


@dataclass
class Control:
    run: Run[Any]
    config: TrainingConfig
    clock: Callable[[], float] = time.monotonic  # tests replace it and `sleep`
    sleep: Callable[[float], None] = time.sleep
    steps_done: int = 0
    ending: bool = False  # the run is to end before its last step
    pausing: bool = False  # the file `pause` existed after the last step
    began: float = field(init=False)
    last_saved: float = field(init=False)  # `began` before the first checkpoint

    def __post_init__(self) -> None:
        self.began = self.last_saved = self.clock()
        # A `stop` that is there already was meant for an earlier run.
        self._take(STOP)

    def after_step(self) -> None:
        self.steps_done += 1
        self.pausing = self._pause_requested
        minutes = (self.clock() - self.began) / 60
        most_steps, most_minutes = self.config.stop_after_steps, self.config.stop_after_minutes
        if self.stop_requested():
            return
        if most_steps is not None and self.steps_done >= most_steps:
            self._end(f"stopped after {self.steps_done} steps, as [train] stop_after_steps says")
        elif most_minutes is not None and minutes >= most_minutes:
            self._end(f"stopped after {minutes:.1f} minutes, as [train] stop_after_minutes says")

    def wants_checkpoint(self) -> bool:
        """Deletes the file `checkpoint`."""
        return self._take(CHECKPOINT)

    def overdue(self) -> bool:
        return self.clock() - self.last_saved >= 60 * self.config.checkpoint_minutes

    def saved(self) -> None:
        self.last_saved = self.clock()

    def stop_requested(self) -> bool:
        """Like `ending`, but looks for an interrupt and the file `stop` first. Deletes the file."""
        # No `run.report.pause(reason)` after an interrupt: whoever pressed Ctrl-C knows why the run ends.
        if self.run.report.stop():
            self.ending = True
        elif self._take(STOP):
            self._end("stopped by the file `stop`")
        return self.ending

    def wait_while_paused(self) -> None:
        if not self.pausing or self.ending:
            return
        self.run.report.say(f"paused; remove {self.run.output.artifacts / PAUSE} to go on")
        while self._pause_requested and not self.ending:
            self.sleep(POLL_SECONDS)
            self.stop_requested()

    @property
    def _pause_requested(self) -> bool:
        return (self.run.output.artifacts / PAUSE).exists()

    def _take(self, name: str) -> bool:
        try:
            (self.run.output.artifacts / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _end(self, reason: str) -> None:
        self.ending = True
        self.run.report.pause(reason)
