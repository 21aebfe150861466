"""Steering a training run from outside: files in its artifacts folder, and segments of steps or minutes.

    stop         a checkpoint is kept and the run ends; the same command goes on
    checkpoint   a checkpoint is kept and the run goes on
    pause        a checkpoint is kept and the run waits, with all in memory, until the file is gone

Looked for once per step, after it: a step is never left half done. A `stop`, like an interrupt, is looked for before the first
step and between the pieces of a measurement too: the next command measures again. `stop` and `checkpoint` are removed when
they are heeded, and a `stop` that lies there when the command begins is removed unheeded: it was meant for another.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from stages.stage import StageContext

STOP, CHECKPOINT, PAUSE = "stop", "checkpoint", "pause"
WAIT = 0.2  # seconds between two looks at `pause`


@dataclass
class Control:
    """What was asked for since this was made, the first thing of a run. `ending` is true once the run is to end early."""

    ctx: StageContext
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    ending: bool = False
    waiting: bool = False  # a pause was seen; from then on it has its checkpoint

    def __post_init__(self) -> None:
        self.taken(STOP)  # what was meant for an earlier run

    def step(self) -> None:
        """Another step is done: find what was asked for meanwhile. Says why the run ends, where it is not an interrupt."""
        self.done += 1
        self.waiting = self.paused
        c = self.ctx.config
        minutes = (time.monotonic() - self.began) / 60
        if self.stopped():
            return
        if c.stop_after_steps is not None and self.done >= c.stop_after_steps:
            self._end(f"stopped after {self.done} steps, as [train] stop_after_steps says")
        elif c.stop_after_minutes is not None and minutes >= c.stop_after_minutes:
            self._end(f"stopped after {minutes:.1f} minutes, as [train] stop_after_minutes says")

    def saves(self) -> bool:
        """Whether a checkpoint is to be kept now: at an end, where one was asked for, and before a pause."""
        return self.taken(CHECKPOINT) or self.ending or self.waiting

    @property
    def paused(self) -> bool:
        """Whether the file is there."""
        return (self.ctx.artifacts / PAUSE).exists()

    def wait(self) -> None:
        """Return at once, or when the pause is over."""
        if not self.waiting or self.ending:
            return
        self.ctx.say(f"paused; remove {self.ctx.artifacts / PAUSE} to go on")
        while self.paused and not self.ending:
            time.sleep(WAIT)
            self.stopped()

    def taken(self, name: str) -> bool:
        """Whether a file lay there. It is gone afterwards."""
        try:
            (self.ctx.artifacts / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def stopped(self) -> bool:
        """Whether the run ends early, an interrupt or the file `stop` being among the reasons; looked for now."""
        if self.ctx.stop():
            self.ending = True
        elif self.taken(STOP):
            self._end("stopped by the file `stop`")
        return self.ending

    def _end(self, reason: str) -> None:
        self.ending = True
        self.ctx.pause(reason)
