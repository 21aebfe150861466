"""The learning rate as a function of the step alone, so that a run can be made longer without changing its past."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule: a learning rate for each step. During the first `warmup` steps, the rate rises linearly to
    `base`. With the shape "constant", it then stays at `base`. With "linear" or "cosine", it then falls to `floor * base` during
    `decay` steps and stays there.
    """

    base: float
    shape: Shape = "constant"
    warmup: int = 0
    decay: int = 0
    floor: float = 0.0

    def at(self, step: int) -> float:
        """Return the learning rate of a step. Steps are counted from 1. The last step of the warm-up has the full rate."""
        if step <= self.warmup:
            return self.base * step / self.warmup
        if self.shape == "constant":
            return self.base
        done = min((step - self.warmup) / max(self.decay, 1), 1.0)
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.base * (self.floor + (1 - self.floor) * left)
