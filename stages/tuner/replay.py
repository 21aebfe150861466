"""One step of a run computed again: its losses are those in the table, to the bit on the machine that wrote them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from stages.tuner.blockwise.device import limit_command_buffers
from stages.tuner.checkpoint import ADAPTER, OPTIMIZER, Checkpoint, find_checkpoints
from stages.tuner.loader import Loader
from stages.tuner.loop import load_training
from stages.tuner.memory_plan import saved_max_tokens
from stages.tuner.task import Task, TrainingContext
from stages.tuner.validation import TRAIN


@dataclass(frozen=True)
class ReplayedSample:
    """One sample of a step: its number in the step, its loss now, and the loss in the table; None if the table lacks it."""

    number: int
    sample: Any
    loss: float
    logged: float | None


def replay_step(ctx: TrainingContext, task: Task[Any, Any], step: int) -> list[ReplayedSample]:
    """Take the steps from the newest checkpoint before `step`, or from the start, to `step`. Writes nothing. Steps are computed
    by the memory plan that the run's checkpoints record. ValueError for a step that the run does not have.
    """
    checkpoints = find_checkpoints(ctx.artifacts)
    if not 1 <= step <= task.config.steps:
        raise ValueError(f"replay: the step must be 1 to {task.config.steps}, got {step}")
    start = checkpoint_before(checkpoints, step)
    limit_command_buffers()  # before anything asks MLX for an array
    known = start or (checkpoints[-1] if checkpoints else None)
    plan = task.memory_plan(known, recorded=known is not None)
    if start:
        plan = replace(plan, max_tokens=saved_max_tokens(start.state))
    training, schedule = load_training(task, start, plan), task.config.learning_rate()
    samples: list[Any] = []
    losses: list[float] = []
    for at, batches, _ in Loader(task, range(start.step + 1 if start else 1, step + 1)):
        samples = [sample for batch in batches for sample in batch.samples]
        losses = training.step(batches, schedule.at(at)).losses
        ctx.progress(at, step, "steps")
    rows = ctx.stored.select(["step", "split", "sample", "loss"]).to_pylist()
    logged = {row["sample"]: row["loss"] for row in rows if (row["step"], row["split"]) == (step, TRAIN)}
    return [ReplayedSample(n, sample, loss, logged.get(n)) for n, (sample, loss) in enumerate(zip(samples, losses, strict=True))]


def checkpoint_before(checkpoints: list[Checkpoint], step: int) -> Checkpoint | None:
    """The newest checkpoint before `step` from which training can go on; None if there is none. Newest first in, as found."""
    earlier = (saved for saved in checkpoints if saved.step < step)
    return next((saved for saved in earlier if saved.intact(ADAPTER, OPTIMIZER)), None)
