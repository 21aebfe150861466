"""Check the losses of a run against two values that are known before it begins: the untrained model's loss, and the loss of
a model that knows nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

from stages.tuner.task import ExpectedLoss, Row
from stages.tuner.validation import TRAIN

FIRST_STEPS = 50  # steps whose losses are compared with the untrained model's; later, training has changed it
LEAST = 12  # samples without which nothing is said
SURE = 3.0  # standard errors between a mean and its limit
LAST = 50  # samples whose mean shows that the loss has collapsed
WORSE = 1.5  # a collapsed loss is so many times the loss at the start


@dataclass(frozen=True)
class Mean:
    """The mean of some numbers, `value`, and its standard error, `error`."""

    value: float
    error: float

    @classmethod
    def of(cls, numbers: Iterable[float]) -> Mean:
        """Return the mean of `numbers` with its standard error. There must be at least two numbers."""
        found = list(numbers)
        return cls(fmean(found), stdev(found) / math.sqrt(len(found)))


class LossCheck:
    """A check of the losses of a training run. Call the method `after` once per step. `after` checks two means of
    losses: that of the first steps, and that of the latest samples. `say(text)` shows a warning to the user. `expected`
    describes the loss that a run should start with; with None, nothing is checked. `past` has the rows of the table of
    losses for the earlier steps of a resumed run. The means include these losses, but no warning is shown for earlier
    steps.

    Creating a `LossCheck` raises ValueError if the losses in `past` have collapsed. A collapsed loss means that the
    model has forgotten what it knew before the training.

    A loss is divided by the loss that a model without any knowledge has for this sample. So losses of different noise
    levels can be averaged, and 1 means that the model knows nothing.
    """

    def __init__(self, say: Callable[[str], None], expected: ExpectedLoss | None, past: Iterable[Row] = ()) -> None:
        self.say: Callable[[str], None] = lambda line: None
        self.expected = expected
        self.first: list[float] = []
        self.last: deque[float] = deque(maxlen=LAST)
        self.warned = False
        steps: dict[int, list[Row]] = {}
        for row in past:
            steps.setdefault(row["step"], []).append(row)
        for step in sorted(steps):
            self.after(step, steps[step])
        self.say = say

    def after(self, step: int, rows: Iterable[Row]) -> None:
        """Count the losses of one training step, and check them. `step` is the number of the step. `rows` are its rows
        of the table of losses. The user is warned, once, if the first losses are not those of an untrained model.
        Raises ValueError if the loss has collapsed: the model has forgotten what it knew before the training.
        """
        if self.expected is None:
            return
        for row in rows:
            known_nothing = self.expected.uninformed(row) if row["split"] == TRAIN else None
            if known_nothing and math.isfinite(row["loss"]):
                self.last.append(row["loss"] / known_nothing)
                if step <= FIRST_STEPS:
                    self.first.append(self.last[-1])
        if step <= FIRST_STEPS and not self.warned and len(self.first) >= LEAST:
            self._check_start(step, self.expected, Mean.of(self.first))
        if step > FIRST_STEPS and len(self.first) >= LEAST and len(self.last) == LAST:
            self._check_collapse(step, Mean.of(self.first[:LEAST]), Mean.of(self.last))

    def _check_start(self, step: int, expected: ExpectedLoss, found: Mean) -> None:
        low, high = expected.start
        if low <= found.value + SURE * found.error and found.value - SURE * found.error <= high:
            return
        self.warned = True
        self.say(
            f"step {step}: the loss is {found.value:.2f} times that of {expected.nobody}; it should begin at "
            f"{low:g} to {high:g} ({expected.source}): {expected.remedy}"
        )

    def _check_collapse(self, step: int, first: Mean, last: Mean) -> None:
        if last.value - SURE * last.error > max(1.0, WORSE * first.value):
            raise ValueError(
                f"train: stopped at step {step}: the loss has collapsed, from {first.value:.2f} to {last.value:.2f} times that "
                "of a model that knows nothing; lower [train] lr"
            )
