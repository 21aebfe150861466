"""Replay of one training step. On the machine that trained the run, the losses equal those in the run's table to the bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from stages.tuner.blockwise.device import configure_scheduler
from stages.tuner.checkpoint import ADAPTER, OPTIMIZER, Checkpoint, find_checkpoints
from stages.tuner.loader import Loader
from stages.tuner.loop import load_training
from stages.tuner.memory_plan import MemoryPlan, saved_max_tokens
from stages.tuner.task import Task, TrainingContext
from stages.tuner.validation import TRAIN


@dataclass(frozen=True)
class ReplayedSample:
    """One sample of a replayed training step. `number` is its index in the step, and `sample` is the task's sample. `loss` is the
    loss computed now. `logged` is the loss in the table of the original run, or None if the table has no such row.
    """

    number: int
    sample: Any
    loss: float
    logged: float | None


def replay_step(ctx: TrainingContext, task: Task[Any, Any], step: int) -> list[ReplayedSample]:
    """Compute training step `step`, counted from 1, again. Return a list of its samples with their losses. `ctx` is the
    run's context: its rows and folder. `task` supplies data, model and settings. Training starts from the newest
    checkpoint before `step`, or from the beginning. Nothing is written. Raises ValueError if `step` is not from 1 to
    the last step of the run.

    The steps use the memory plan that a checkpoint of the run records. The plan sets how many blocks are computed
    twice.
    """
    checkpoints = find_checkpoints(ctx.artifacts)
    if not 1 <= step <= task.config.steps:
        raise ValueError(f"replay: the step must be 1 to {task.config.steps}, got {step}")
    start = checkpoint_before(checkpoints, step)
    configure_scheduler()  # before the first MLX operation
    known = start or (checkpoints[-1] if checkpoints else None)
    plan = recorded_plan(task, known, start)
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


def recorded_plan(task: Task[Any, Any], known: Checkpoint | None, start: Checkpoint | None) -> MemoryPlan:
    """Return the memory plan with which steps of an earlier run are computed again. `task` supplies data, model and
    settings. `known` is a checkpoint of the run, which has recorded the run's plan. The recorded plan is used if it
    fits into memory. If `known` is None, a plan is chosen as for a new run. `start` is the checkpoint from which the
    steps are repeated, or None for the beginning of the run. If `start` is given, its recorded limit of tokens is used.

    A memory plan says how many of the last blocks keep their activations. It also limits the tokens of a micro-batch
    (samples computed at once). If `start` is a checkpoint, `known` should be this checkpoint too. If `start` is None,
    `known` can be any checkpoint of the run. If the plan in `known` does not fit, the fastest plan that fits is chosen.
    """
    plan = task.memory_plan(known, recorded=known is not None)
    return replace(plan, max_tokens=saved_max_tokens(start.state)) if start else plan


def checkpoint_before(checkpoints: list[Checkpoint], step: int) -> Checkpoint | None:
    """Return the newest checkpoint before `step` with an intact adapter and optimizer state. If there is none, the result is
    None. `checkpoints` must be sorted, newest first.
    """
    earlier = (saved for saved in checkpoints if saved.step < step)
    return next((saved for saved in earlier if saved.intact(ADAPTER, OPTIMIZER)), None)
