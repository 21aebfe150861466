"""Compute a step of a run again, to see its samples and explain its losses."""

from __future__ import annotations

from stages.stage import StageContext
from stages.text_to_image.train.task import ImageTask
from stages.tuner.replay import ReplayedSample, replay_step


def replay(ctx: StageContext, step: int) -> list[ReplayedSample]:
    """Compute the losses of training step `step` again and return one result per sample. `ctx` is the context of the
    stage `train`. The computation starts from the newest checkpoint before the step, and writes nothing. A result has
    `loss`, the new loss, and `logged`, the loss in the table or None. Its `sample` is a `Sample` with crop, caption and
    noise level. Raises ValueError if the run has no such step.
    """
    return replay_step(ctx, ImageTask(ctx), step)
