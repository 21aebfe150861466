"""Replay of one training step. On the machine that trained the run, the losses equal those in the run's table to the bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from stages.run import Run
from stages.tuner.blockwise.device import configure_scheduler
from stages.tuner.checkpoint import ADAPTER, OPTIMIZER, Checkpoint, find_checkpoints
from stages.tuner.loader import Loader
from stages.tuner.loop import load_training
from stages.tuner.memory import MemoryPlan, choose_plan
from stages.tuner.task import Task
from stages.tuner.validation import TRAIN


@dataclass(frozen=True)
class ReplayedSample:
    number: int  # index in the step
    sample: Any
    loss: float  # computed now
    logged: float | None  # in the table of the run; None: no such row


def replay_step(run: Run[Any], task: Task[Any, Any], step: int) -> list[ReplayedSample]:
    """Losses of a step, computed again from the newest checkpoint before it. Raises ValueError if the run has no such step."""
    checkpoints = find_checkpoints(run.output.artifacts)
    if not 1 <= step <= task.config.steps:
        raise ValueError(f"replay: the step must be 1 to {task.config.steps}, got {step}")
    start = checkpoint_before(checkpoints, step)
    configure_scheduler()  # before the first MLX operation
    # All checkpoints record the plan; the limit of tokens changes during a run, and only that of `start` is right.
    known = start or (checkpoints[-1] if checkpoints else None)
    plan = recorded_plan(run, task, known, start)
    training, schedule = load_training(task, start, plan), task.config.learning_rate()
    samples: list[Any] = []
    losses: list[float] = []
    for at, batches, _ in Loader(task, range(start.step + 1 if start else 1, step + 1)):
        samples = [sample for batch in batches for sample in batch.samples]
        losses = training.step(batches, schedule.at(at)).losses
        run.report.progress(at, step, "steps")
    rows = run.output.stored.select(["step", "split", "sample", "loss"]).to_pylist()
    logged = {row["sample"]: row["loss"] for row in rows if (row["step"], row["split"]) == (step, TRAIN)}
    return [ReplayedSample(n, sample, loss, logged.get(n)) for n, (sample, loss) in enumerate(zip(samples, losses, strict=True))]


def recorded_plan(run: Run[Any], task: Task[Any, Any], known: Checkpoint | None, start: Checkpoint | None) -> MemoryPlan:
    """The plan that `known` recorded, if it fits. `start`: where the steps are repeated from."""
    plan = choose_plan(task.estimator(), known, run.report.say, recorded=known is not None)
    return replace(plan, max_tokens=start.state.get("max_tokens")) if start else plan


def checkpoint_before(checkpoints: list[Checkpoint], step: int) -> Checkpoint | None:
    """The newest checkpoint before `step` with an intact adapter and optimizer. `checkpoints`: newest first."""
    earlier = (saved for saved in checkpoints if saved.step < step)
    return next((saved for saved in earlier if saved.intact(ADAPTER, OPTIMIZER)), None)
