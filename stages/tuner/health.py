"""Health checks during training: loss, gradient and adapter must be finite, and the adapter must change at a sound rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from stages.tuner.adapters import lora
from stages.tuner.config import TrainingConfig
from stages.tuner.step import StepResult, TrainingStep

MOST_SKIPPED = 3  # steps in a row without a finite loss and gradient that end the run
MOVED_BY = 10  # the step after which every run must have moved its adapter
RATIO_EVERY = 100  # steps between two checks of the update's length
# Sound lengths of an update relative to the adapter: above float32's rounding, and below a new adapter in ten steps.
RATIOS = (1e-7, 0.1)


def checks_update(step: int) -> bool:
    return step % RATIO_EVERY == 0 or step in (1, MOVED_BY)


def check_health(
    say: Callable[[str], None], config: TrainingConfig, training: TrainingStep, step: int, skipped: int, result: StepResult
) -> None:
    """`skipped`: steps in a row, up to this one, with no finite loss and gradient. Raises ValueError if training cannot go on."""
    lr = config.lr
    if not result.bounded:
        raise ValueError(
            f"train: stopped at step {step}: the update made the adapter or the optimizer's state infinite, so neither is saved; "
            f"lower [train] lr ({lr:g})"
        )
    if skipped:
        say(f"step {step}: the loss or the gradient is not finite; the step is skipped")
    if skipped >= MOST_SKIPPED:
        raise ValueError(
            f"train: stopped at step {step}: {skipped} steps in a row had no finite loss and gradient; lower [train] lr "
            f'({lr:g}), or try precision = "float32"'
        )
    # An adapter from `initial` is not zero at the start: the check would see nothing.
    if step == MOVED_BY and not config.initial:
        _check_moved(say, lr, training, step)
    if result.update_ratio is not None and result.finite:
        _check_size(say, config, step, result.update_ratio)


def _check_size(say: Callable[[str], None], config: TrainingConfig, step: int, ratio: float) -> None:
    # Prodigy begins with a very small rate and raises it by itself.
    rises = config.optimizer.kind == "prodigy" and step < RATIO_EVERY
    if ratio > RATIOS[1] or (ratio < RATIOS[0] and not rises):
        change = "raise" if ratio < RATIOS[0] else "lower"
        say(f"step {step}: the update is {ratio:.1g} of the adapter's length; {change} [train] lr ({config.lr:g})")


def _check_moved(say: Callable[[str], None], lr: float, training: TrainingStep, step: int) -> None:
    still = unmoved_linears(training)
    if not still:
        return
    if len(still) == len(training.targets):
        raise ValueError(f"train: stopped at step {step}: the adapter has not moved; raise [train] lr ({lr:g})")
    others = f", nor have {len(still) - 1} other Linears" if len(still) > 1 else ""
    say(f"step {step}: {still[0]} has not moved{others}; no gradient reaches it, and [train] targets could leave it out")


def unmoved_linears(training: TrainingStep) -> list[str]:
    """Linears whose adapter still changes nothing: the arrays that start at zero (`B` of LoRA, `w2` of LoKr) are zero."""
    adapter = training.adapter
    names = [target.name for target in training.targets]
    # One transfer for all Linears.
    moved: Any = mx.stack([lora.largest_change(lora.arrays_of_linear(adapter, name)) for name in names]).tolist()
    return [name for name, most in zip(names, moved, strict=True) if most == 0]
