"""The learning rate as a function of the step alone, so that a run can be made longer without changing its past."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    base: float
    shape: Shape = "constant"
    warmup: int = 0  # steps
    decay: int = 0  # steps after the warm-up in which linear and cosine fall
    floor: float = 0.0  # share of base

    def at(self, step: int) -> float:
        """Steps count from 1; the last step of the warm-up has the full rate."""
        if step <= self.warmup:
            return self.base * step / self.warmup
        if self.shape == "constant":
            return self.base
        done = min((step - self.warmup) / max(self.decay, 1), 1.0)
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.base * (self.floor + (1 - self.floor) * left)
