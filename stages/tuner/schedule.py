"""The learning rate as a function of the step alone, so that a run can be made longer without changing its past."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """A learning rate per step: it rises linearly to `base` over `warmup` steps, then follows `shape`. "constant" stays at
    `base`; "linear" and "cosine" fall to `floor * base` over the next `decay` steps and stay there.
    """

    base: float
    shape: Shape = "constant"
    warmup: int = 0
    decay: int = 0
    floor: float = 0.0

    def at(self, step: int) -> float:
        """The learning rate of a step, counted from 1. Step `warmup` is the first with the full rate."""
        if step <= self.warmup:
            return self.base * step / self.warmup
        if self.shape == "constant":
            return self.base
        done = min((step - self.warmup) / max(self.decay, 1), 1.0)
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.base * (self.floor + (1 - self.floor) * left)
