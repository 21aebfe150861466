"""Compute a step of a run again, to see its samples and explain its losses."""

from __future__ import annotations

from stages.stage import StageContext
from stages.text_to_image.train.task import ImageTask
from stages.tuner.replay import ReplayedSample, replay_step


def replay(ctx: StageContext, step: int) -> list[ReplayedSample]:
    """Compute the losses of step `step` again, from the newest checkpoint before it, and return one result per sample. Writes
    nothing. The attribute `sample` of a result is a `Sample` with crop, caption and noise level. Raises ValueError if the run has
    no such step.
    """
    return replay_step(ctx, ImageTask(ctx), step)
