"""How a run computes its steps, and how soon it hands work to a CUDA device, which is decided while the device has none.

MLX reads how much it may hand over at once when the first operation for the device is made, computed or not, and never
again. The estimate that chooses the plan is made of operations; so it is asked twice, first as if of a CPU. That needs a
little more than the device: where the two differ the plan is near its limit, and less in flight is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from stages import fit
from stages.models import flux2
from stages.models.load import sizes
from stages.stage import StageContext
from stages.trainset import Course
from stages.tuner import memory
from stages.tuner.backprop import Plan, hand_over_sooner, hands_over_late
from stages.tuner.checkpoint import Checkpoint


def choose(ctx: StageContext, course: Course, start: Checkpoint | None) -> fit.Fit:
    """What fit chooses, and work handed over as suits it: before anything else asks MLX for an array.

    ValueError in one line, with what would fit, if nothing does.
    """
    if hands_over_late():
        limit = memory.budget(ctx.config.memory_gb)  # the device's, not the CPU's
        with off_device():
            plan = likely(ctx, course, start, limit)
        hand_over_sooner(plan)
    return fit.choose(ctx, course, start)


def likely(ctx: StageContext, course: Course, start: Checkpoint | None, limit: int) -> Plan:
    """The plan that fit will choose, or one that needs less."""
    config = flux2.Flux2Config.from_dict(sizes(ctx.weights("transformer"), ctx.family.transformer))
    begun = start.state.get("plan") if start else None
    try:
        return fit.settle(fit.Question(ctx.config, config), fit.largest(course), limit, begun)[1]
    except ValueError:  # fit itself says it, if it is so on the device too
        return "blocks"


@contextmanager
def off_device() -> Iterator[None]:
    """Operations are made for the CPU."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        yield
    finally:
        mx.set_default_device(before)
