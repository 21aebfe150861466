"""Health checks after each step: loss, gradient, adapter are finite, it changes at a sound rate, losses are as expected."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

import mlx.core as mx

from stages.tuner.adapters import lora
from stages.tuner.config import TrainingConfig
from stages.tuner.step import StepResult, TrainingStep
from stages.tuner.task import ExpectedLoss, Row
from stages.tuner.validation import TRAIN

MOST_SKIPPED = 3  # steps in a row without a finite loss and gradient that end the run
MOVED_BY = 10  # the step after which every run must have moved its adapter
RATIO_EVERY = 100  # steps between two checks of the update's length
# Sound lengths of an update relative to the adapter: above float32's rounding, and below a new adapter in ten steps.
RATIOS = (1e-7, 0.1)

FIRST_STEPS = 50  # steps whose losses are compared with the untrained model's; later, training has changed it
LEAST_SAMPLES = 12  # samples without which nothing is said
SURE = 3.0  # standard errors between a mean and its limit
LAST_SAMPLES = 50  # samples whose mean shows that the loss has collapsed
WORSE = 1.5  # a collapsed loss is so many times the loss at the start


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
        adapter, names = training.arrays, [target.name for target in training.targets]
        # The largest values of the arrays that start at zero, `B` of LoRA and `w2` of LoKr, in one transfer for all Linears.
        moved: Any = mx.stack([lora.largest_change(lora.arrays_of_linear(adapter, name)) for name in names]).tolist()
        still = [name for name, most in zip(names, moved, strict=True) if most == 0]
        if len(still) == len(names):
            raise ValueError(f"train: stopped at step {step}: the adapter has not moved; raise [train] lr ({lr:g})")
        if still:
            others = f", nor have {len(still) - 1} other Linears" if len(still) > 1 else ""
            say(f"step {step}: {still[0]} has not moved{others}; no gradient reaches it, and [train] targets could leave it out")
    if result.update_ratio is not None and result.finite:
        _check_size(say, config, step, result.update_ratio)


def _check_size(say: Callable[[str], None], config: TrainingConfig, step: int, ratio: float) -> None:
    # Prodigy begins with a very small rate and raises it by itself.
    rises = config.optimizer.kind == "prodigy" and step < RATIO_EVERY
    if ratio > RATIOS[1] or (ratio < RATIOS[0] and not rises):
        change = "raise" if ratio < RATIOS[0] else "lower"
        say(f"step {step}: the update is {ratio:.1g} of the adapter's length; {change} [train] lr ({config.lr:g})")


def _mean_and_margin(numbers: Sequence[float]) -> tuple[float, float]:
    return fmean(numbers), SURE * (stdev(numbers) / math.sqrt(len(numbers)))


class LossCheck:
    """Warns once if the first losses are not those of an untrained model; raises ValueError if the loss collapses.

    Losses are divided by that of a model that knows nothing about the sample: 1 at every noise level means nothing is known.
    """

    def __init__(self, say: Callable[[str], None], expected: ExpectedLoss | None, past: Iterable[Row] = ()) -> None:
        self.say, self.expected = say, expected
        self.first: list[float] = []
        self.last: deque[float] = deque(maxlen=LAST_SAMPLES)
        self.warned = False
        steps: dict[int, list[Row]] = {}
        for row in past:
            steps.setdefault(row["step"], []).append(row)
        for step in sorted(steps):
            # Earlier steps of a resumed run count, but were warned about then.
            self.after(step, steps[step], quiet=True)

    def after(self, step: int, rows: Iterable[Row], quiet: bool = False) -> None:
        if self.expected is None:
            return
        for row in rows:
            known_nothing = self.expected.uninformed(row) if row["split"] == TRAIN else None
            if known_nothing and math.isfinite(row["loss"]):
                self.last.append(row["loss"] / known_nothing)
                if step <= FIRST_STEPS:
                    self.first.append(self.last[-1])
        if step <= FIRST_STEPS and not self.warned and len(self.first) >= LEAST_SAMPLES:
            self._check_start(step, self.expected, quiet)
        if step > FIRST_STEPS and len(self.first) >= LEAST_SAMPLES and len(self.last) == LAST_SAMPLES:
            first, (last, margin) = fmean(self.first[:LEAST_SAMPLES]), _mean_and_margin(self.last)
            if last - margin > max(1.0, WORSE * first):
                raise ValueError(
                    f"train: stopped at step {step}: the loss has collapsed, from {first:.2f} to {last:.2f} times that "
                    "of a model that knows nothing; lower [train] lr"
                )

    def _check_start(self, step: int, expected: ExpectedLoss, quiet: bool) -> None:
        (low, high), (found, margin) = expected.start, _mean_and_margin(self.first)
        if low <= found + margin and found - margin <= high:
            return
        self.warned = True
        if quiet:
            return
        self.say(
            f"step {step}: {expected.remedy} (the loss is {found:.2f} times that of {expected.nobody}; expected: "
            f"{low:g} to {high:g}, {expected.source})"
        )
