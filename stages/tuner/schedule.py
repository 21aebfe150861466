"""The learning rate as a function of the step alone, so that a run can be made longer without changing its past."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule: a learning rate for each step. The rate rises linearly to `base` during the first `warmup` steps.
    After that, the shape "constant" stays at `base`; "linear" and "cosine" fall to `floor * base` during the next `decay` steps
    and stay there.
    """

    base: float
    shape: Shape = "constant"
    warmup: int = 0
    decay: int = 0
    floor: float = 0.0

    def at(self, step: int) -> float:
        """Return the learning rate of a step. Steps are counted from 1; the last step of the warm-up has the full rate."""
        if step <= self.warmup:
            return self.base * step / self.warmup
        if self.shape == "constant":
            return self.base
        done = min((step - self.warmup) / max(self.decay, 1), 1.0)
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.base * (self.floor + (1 - self.floor) * left)
