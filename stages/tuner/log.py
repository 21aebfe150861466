"""Lines for the user: warnings about settings, what is trained, and the progress of the run after each step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from stages.run import Run
from stages.tuner.config import TrainingConfig
from stages.tuner.step import TrainingStep
from stages.tuner.task import Row, Task
from stages.tuner.validation import TRAIN, Validation

SMOOTHED = 50  # steps whose mean is the smoothed loss


class Summary:
    def __init__(self, config: TrainingConfig, past: Iterable[Row]) -> None:
        self.config = config
        self.losses: deque[float] = deque(maxlen=SMOOTHED)  # the mean loss of each of the last steps
        steps: dict[int, list[float]] = {}
        for row in past:
            if row["split"] == TRAIN:
                steps.setdefault(row["step"], []).append(row["loss"])
        self.losses.extend(_mean(losses) for _, losses in sorted(steps.items()))

    def after(self, rows: Sequence[Row], validation: Validation) -> str:
        """One line, such as "loss 0.6120, held out 0.6400, lr 0.0003, checkpoint in 12 steps, 1.9 GB". Call it once per step."""
        trained = [row for row in rows if row["split"] == TRAIN]
        step, lr, peak = (trained[0][name] for name in ("step", "lr", "peak_bytes"))
        self.losses.append(_mean([row["loss"] for row in trained]))
        parts = [f"loss {_mean([loss for loss in self.losses if math.isfinite(loss)]):.4f}"]
        means = validation.means
        if means:
            best = validation.best_step
            lowest = f" (best {means[best]:.4f} at {best})" if best is not None and best != max(means) else ""
            parts.append(f"held out {means[max(means)]:.4f}{lowest}")
        every = self.config.checkpoint_every
        left = min(every - step % every, validation.last_step - step) if step % every else min(every, validation.last_step - step)
        parts.append(f"lr {lr:.2g}")
        if left > 0:
            parts.append(f"checkpoint in {left} step{'s' if left > 1 else ''}")
        return ", ".join([*parts, f"{peak / 1e9:.3g} GB"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def warn(say: Callable[[str], None], task: Task[Any, Any]) -> None:
    for line in task.warnings():
        say(line)
    if task.config.precision == "bfloat16" and mx.default_device() == mx.cpu:
        say('bfloat16 is slow on a CPU; [train] precision = "float32" is faster')
    for line in schedule_warnings(task.config):
        say(line)


def schedule_warnings(config: TrainingConfig) -> Iterator[str]:
    s, end = config.schedule, config.schedule.warmup_steps + config.schedule.decay_steps
    if config.steps <= s.warmup_steps:
        yield (
            f"all {config.steps} steps are warm-up, below the full rate: lower [train.schedule] warmup_steps ({s.warmup_steps})"
        )
    elif s.shape != "constant" and end < config.steps and not s.floor:
        yield f"from step {end} on the rate is 0 and nothing is trained: raise [train.schedule] decay_steps ({s.decay_steps})"
    elif s.shape != "constant" and end > config.steps:
        yield f"the rate reaches its floor at step {end}, after the last: lower [train.schedule] decay_steps ({s.decay_steps})"


def announce(run: Run[Any], task: Task[Any, Any], training: TrainingStep, steps: range) -> None:
    values = sum(value.size for value in training.adapter.values())
    ranks = sorted({target.rank for target in training.targets})
    adapter = f"{task.config.variant} of rank {' to '.join(map(str, sorted({ranks[0], ranks[-1]})))}"
    stretch = f"steps {steps.start} to {steps[-1]}" if steps else "one measurement is left to do"
    run.report.say(f"files named stop, checkpoint or pause in {run.output.artifacts} control this run")
    run.report.say(f"{adapter} on {len(training.targets)} Linears: {values / 1e6:.2g} M values; {stretch}")
    run.report.say(task.description())
