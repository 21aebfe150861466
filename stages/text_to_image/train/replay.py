"""A step of a run computed again: what did it train on, and why was its loss what it was?"""

from __future__ import annotations

from stages.stage import StageContext
from stages.text_to_image.train.task import ImageTask
from stages.tuner.replay import ReplayedSample, replay_step


def replay(ctx: StageContext, step: int) -> list[ReplayedSample]:
    """Compute the losses of a step again, from the newest checkpoint before it. Writes nothing. The `sample` of each result is a
    `Sample`: crop, caption and noise level. ValueError for a step that the run does not have.
    """
    return replay_step(ctx, ImageTask(ctx), step)
