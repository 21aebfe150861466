"""How noisy the training samples are: the distribution of sigma, 0 (clean) to 1 (noise), defined by its density.

A draw is a base distribution, then a shift towards noise, s' = S s / (1 + (S - 1) s), with S = 1 for none. The shift
by resolution takes S = exp(mu), mu on FLUX.1's line through (256 tokens, 0.5) and (4096 tokens, 1.15): more tokens
show the same picture at more noise, so S is 1.88 at 512 px and 3.16 at 1024 px. It is not the shift that FLUX.2
samples with, which depends on the number of steps too; no trainer found trains with that one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

BASES = ("uniform", "logit_normal")
SHIFTS = ("none", "static", "resolution")


@dataclass(frozen=True)
class Noise:
    """A distribution of sigma. `mean` and `std` are those of the logit where the base is logit_normal."""

    base: str = "uniform"
    mean: float = 0.0
    std: float = 1.0
    shift: str = "none"
    factor: float = 1.0

    def strength(self, tokens: int) -> float:
        """S of the shift, for an image of so many tokens."""
        if self.shift == "resolution":
            return math.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256))
        return self.factor if self.shift == "static" else 1.0

    def draw(self, generator: np.random.Generator, tokens: int) -> float:
        """One sigma, as float32 has it."""
        if self.base == "logit_normal":
            sigma = 1 / (1 + math.exp(-(self.mean + self.std * generator.standard_normal())))
        else:
            sigma = generator.random()
        S = self.strength(tokens)
        return float(np.float32(S * sigma / (1 + (S - 1) * sigma)))

    def density(self, sigma: np.ndarray, tokens: int) -> np.ndarray:
        """The probability density at each sigma, 0 < sigma < 1."""
        S = self.strength(tokens)
        before = sigma / (S - (S - 1) * sigma)
        slope = S / (S - (S - 1) * sigma) ** 2
        if self.base == "uniform":
            return slope
        z = (np.log(before / (1 - before)) - self.mean) / self.std
        return slope * np.exp(-(z**2) / 2) / (math.sqrt(2 * math.pi) * self.std * before * (1 - before))
