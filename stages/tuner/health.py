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
    """Return True if the size of the adapter's update is checked after this step. It is checked after step 1, step 10 and every
    100th step.
    """
    return step % RATIO_EVERY == 0 or step in (1, MOVED_BY)


def check_health(
    say: Callable[[str], None], config: TrainingConfig, training: TrainingStep, step: int, skipped: int, result: StepResult
) -> None:
    """Check the result of training step `step`, and warn the user with `say(text)`. `config` holds the settings
    [train]. `training` is the model with its adapter. `result` is the `StepResult` of the step. A step is skipped if
    its loss or its gradient is not finite. `skipped` is the number of steps skipped in a row, up to and including this
    one. Raises ValueError, with a remedy, if training cannot go on.

    Training cannot go on if the adapter or the optimizer's state became infinite. It cannot go on after 3 skipped steps
    in a row. It cannot go on if the adapter is unchanged after step 10. This last check is left out if the setting
    [train] `initial` is set. A warning is given for a skipped step and for an update of unsound size.
    """
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
    if step == MOVED_BY and not config.initial:
        _check_moved(say, lr, training, step)
    if result.update_ratio is not None and result.finite:
        _check_size(say, config, step, result.update_ratio)


def _check_size(say: Callable[[str], None], config: TrainingConfig, step: int, ratio: float) -> None:
    """Warn the user if an update of the adapter is too small or too large. `say(text)` shows the warning. `ratio` is the length
    of the update divided by the adapter's length. It should be from 1e-7 to 0.1 (`RATIOS`). `config` holds the settings
    [train]. `step` is the training step of the update, from 1.

    Prodigy begins with a very small rate and raises it by itself, so a small update is no fault in its first 100 steps.
    """
    rises = config.optimizer.kind == "prodigy" and step < RATIO_EVERY
    if ratio > RATIOS[1] or (ratio < RATIOS[0] and not rises):
        change = "raise" if ratio < RATIOS[0] else "lower"
        say(f"step {step}: the update is {ratio:.1g} of the adapter's length; {change} [train] lr ({config.lr:g})")


def _check_moved(say: Callable[[str], None], lr: float, training: TrainingStep, step: int) -> None:
    """Check that training has changed the adapter of every linear layer. Raises ValueError if training has changed no
    adapter. If some adapters have not changed, call `say` with a warning. `step` and `lr` (the learning rate) appear
    only in the messages. The check makes sense only after some training steps.
    """
    still = unmoved_linears(training)
    if not still:
        return
    if len(still) == len(training.targets):
        raise ValueError(f"train: stopped at step {step}: the adapter has not moved; raise [train] lr ({lr:g})")
    others = f", nor have {len(still) - 1} other Linears" if len(still) > 1 else ""
    say(f"step {step}: {still[0]} has not moved{others}; no gradient reaches it, and [train] targets could leave it out")


def unmoved_linears(training: TrainingStep) -> list[str]:
    """Return the names of the linear layers whose adapter has not changed anything yet. `training` is the model with
    its adapter. The adapter of such a layer has the value 0 in all arrays that start at zero, such as `B` of LoRA and
    `w2` of LoKr.
    """
    adapter = training.adapter
    names = [target.name for target in training.targets]
    moved: Any = mx.stack([lora.largest_change(lora.arrays_of_linear(adapter, name)) for name in names]).tolist()
    return [name for name, most in zip(names, moved, strict=True) if most == 0]
