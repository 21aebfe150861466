"""Compute a step of a run again, to see its samples and explain its losses."""

from __future__ import annotations

from typing import Any

from stages.run import Run
from stages.text_to_image.train.task import ImageTask
from stages.tuner.replay import ReplayedSample, replay_step


def replay(run: Run[Any], step: int) -> list[ReplayedSample]:
    """Compute the losses of a step again; writes nothing. `sample` of a result is a `sampler.Sample`. Raises ValueError
    for no such step.
    """
    return replay_step(run, ImageTask(run), step)
