"""Lines for the user before the first step: what looks wrong in the settings, and what is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from stages.tuner.config import TrainingConfig
from stages.tuner.step import TrainingStep
from stages.tuner.task import Task, TrainingContext


def warn(say: Callable[[str], None], task: Task[Any, Any]) -> None:
    """Print warnings with `say`. There is one line for each setting of the task that is valid but rarely intended."""
    for line in task.warnings():
        say(line)
    if task.config.precision == "bfloat16" and mx.default_device() == mx.cpu:
        say('bfloat16 is slow on a CPU; [train] precision = "float32" is faster')
    for line in schedule_warnings(task.config):
        say(line)


def schedule_warnings(config: TrainingConfig) -> Iterator[str]:
    """Yield a warning for the user if warm-up and decay of the learning rate do not fit the number of steps in `config`."""
    s, end = config.schedule, config.schedule.warmup_steps + config.schedule.decay_steps
    if config.steps <= s.warmup_steps:
        yield (
            f"all {config.steps} steps are warm-up, below the full rate: lower [train.schedule] warmup_steps ({s.warmup_steps})"
        )
    elif s.shape != "constant" and end < config.steps and not s.floor:
        yield f"from step {end} on the rate is 0 and nothing is trained: raise [train.schedule] decay_steps ({s.decay_steps})"
    elif s.shape != "constant" and end > config.steps:
        yield f"the rate reaches its floor at step {end}, after the last: lower [train.schedule] decay_steps ({s.decay_steps})"


def announce(ctx: TrainingContext, task: Task[Any, Any], training: TrainingStep, steps: range) -> None:
    """Print what the run is about to do. The lines name the folder of control files, the adapter's variant, rank and size, the
    steps, and the task's description. `steps` are the steps to do. If only a measurement on held-out samples is left, `steps` is
    empty.
    """
    values = sum(value.size for value in training.adapter.values())
    ranks = sorted({target.rank for target in training.targets})
    adapter = f"{task.config.variant} of rank {' to '.join(map(str, sorted({ranks[0], ranks[-1]})))}"
    stretch = f"steps {steps.start} to {steps[-1]}" if steps else "one measurement is left to do"
    ctx.say(f"files named stop, checkpoint or pause in {ctx.artifacts} control this run")
    ctx.say(f"{adapter} on {len(training.targets)} Linears: {values / 1e6:.2g} M values; {stretch}")
    ctx.say(task.description())
