"""The losses of a run against two that are known before: the untrained model's, and that of one that knows nothing."""

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
    value: float
    error: float  # standard error

    @classmethod
    def of(cls, numbers: Iterable[float]) -> Mean:
        found = list(numbers)
        return cls(fmean(found), stdev(found) / math.sqrt(len(found)))


class LossCheck:
    """Warns once if the first losses are not those of an untrained model; raises ValueError if the loss collapses.

    Losses are divided by that of a model that knows nothing about the sample: 1 at every noise level means that
    nothing is known.
    """

    def __init__(self, say: Callable[[str], None], expected: ExpectedLoss | None, past: Iterable[Row] = ()) -> None:
        # Earlier steps of a resumed run count, but were warned about then.
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
