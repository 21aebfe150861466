"""Control of a running training: files in its artifacts folder, interrupts, and limits on steps or minutes.

    stop         write a checkpoint and end the run; the same command goes on
    checkpoint   write a checkpoint and go on
    pause        write a checkpoint and wait, with everything in memory, until the file is gone

The program looks for the files after each step, so that no step is left half done. `stop`, like an interrupt, is also looked for
before the first step and between the micro-batches of a measurement; the next command repeats that measurement. `stop` and
`checkpoint` are removed once they have taken effect. A `stop` that exists when the command begins was meant for an earlier run
and is removed without effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from stages.tuner.config import TrainingConfig
from stages.tuner.task import TrainingContext

STOP, CHECKPOINT, PAUSE = "stop", "checkpoint", "pause"
POLL_SECONDS = 0.2  # between two checks whether the file `pause` exists


@dataclass
class Control:
    """Watch for requests to stop, pause or save a running training. A request is a file `stop`, `pause` or `checkpoint`
    in the folder `ctx.artifacts`, or an interrupt. The limits `stop_after_steps` and `stop_after_minutes` of `config`
    end the run too. Call `after_step()` after each step.

    A file `stop` that exists at the start is deleted without effect. `clock()` returns seconds, and `sleep(seconds)`
    waits. Tests replace both.
    """

    ctx: TrainingContext
    config: TrainingConfig
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    steps_done: int = 0
    ending: bool = False  # the run is to end before its last step
    pausing: bool = False  # the file `pause` existed after the last step
    began: float = field(init=False)
    last_saved: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.last_saved = self.clock()
        self._take(STOP)

    def after_step(self) -> None:
        """Count a finished training step, and set the attributes `ending` and `pausing`. `ending` becomes True if the user has
        requested a stop, or if a limit in the settings is reached. `pausing` is True if the file `pause` exists.

        If the run must end, `ctx.pause(reason)` shows the reason to the user. After an interrupt, no reason is shown.
        """
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
        """Return True if a checkpoint is due after this step. It is due if the run ends early, if it is about to pause, or if the
        file `checkpoint` exists. The file `checkpoint` is deleted.
        """
        return self._take(CHECKPOINT) or self.ending or self.pausing

    def overdue(self) -> bool:
        """Return True if the last checkpoint is at least `train.checkpoint_minutes` old. Before the first checkpoint,
        the time since the start of the run counts.
        """
        return self.clock() - self.last_saved >= 60 * self.config.checkpoint_minutes

    def saved(self) -> None:
        """Record the current time as the time of the last checkpoint."""
        self.last_saved = self.clock()

    def stop_requested(self) -> bool:
        """Return True if the run must end before its last step. The reasons are an interrupt, the file `stop` and a
        limit of steps or minutes. If the file `stop` exists, the call deletes it.
        """
        if self.ctx.stop():
            self.ending = True
        elif self._take(STOP):
            self._end("stopped by the file `stop`")
        return self.ending

    def wait_while_paused(self) -> None:
        """If the run is paused, wait until the user deletes the file `pause` or the run must end. Otherwise, return at once.
        One line tells the user how to continue.

        The run is paused if the last call of `after_step` found the file `pause`. A run that must end is not paused.
        """
        if not self.pausing or self.ending:
            return
        self.ctx.say(f"paused; remove {self.ctx.artifacts / PAUSE} to go on")
        while self._pause_requested and not self.ending:
            self.sleep(POLL_SECONDS)
            self.stop_requested()

    @property
    def _pause_requested(self) -> bool:
        return (self.ctx.artifacts / PAUSE).exists()

    def _take(self, name: str) -> bool:
        """Delete the control file `name`. Return True if it existed."""
        try:
            (self.ctx.artifacts / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _end(self, reason: str) -> None:
        self.ending = True
        self.ctx.pause(reason)
