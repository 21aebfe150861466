"""How noisy the training samples are: the distribution of sigma, 0 (clean) to 1 (noise), defined by its density.

A draw is a base distribution, then a shift towards noise, s' = S s / (1 + (S - 1) s), with S = 1 for none. The shift
by resolution takes S = exp(mu), mu on FLUX.1's line through (256 tokens, 0.5) and (4096 tokens, 1.15): more tokens
show the same picture at more noise, so S is 1.88 at 512 px and 3.16 at 1024 px. It is not the shift that FLUX.2
samples with, which depends on the number of steps too; no trainer found trains with that one.

The bases by their density p over sigma, before the shift:

    uniform       1
    logit_normal  normal in logit(sigma), `mean` and `std`. Esser et al. 2024, arXiv 2403.03206
    mode          heavy tails around a mode in the middle, `scale`: the same paper, equation 20
    cosmap        2 / (pi (1 - 2 sigma + 2 sigma^2)): the same paper, section 3.1
    high_noise    (1 - sigma)^(-2/3) / 3, mean 3/4: composition and pose are decided there
    low_noise     sigma^(-2/3) / 3, mean 1/4: texture and detail
    both_ends     the mean of high_noise and low_noise

Two trainers call the last three by the same names and mean opposite ends; ELSEWHERE says who means what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from stages.tuner import draws

Floats = NDArray[np.float64]

BASES = ("uniform", "logit_normal", "mode", "cosmap", "high_noise", "low_noise", "both_ends")
SHIFTS = ("none", "static", "resolution")
MODE_SCALES = (-1.0, 2 / (math.pi - 2))  # outside, the draw of `mode` would turn back: the paper's bounds
ELSEWHERE = {
    ("ai-toolkit", "content"): "high_noise",
    ("ai-toolkit", "style"): "low_noise",
    ("ai-toolkit", "balanced"): "uniform",
    ("flux-2-swift-mlx", "content"): "low_noise",
    ("flux-2-swift-mlx", "style"): "high_noise",
    ("flux-2-swift-mlx", "balanced"): "both_ends",
}


@dataclass(frozen=True)
class Noise:
    """A distribution of sigma. `mean` and `std` are logit_normal's, `scale` is mode's, `factor` the static shift's."""

    base: str = "uniform"
    mean: float = 0.0
    std: float = 1.0
    shift: str = "none"
    factor: float = 1.0
    scale: float = 1.29

    def __post_init__(self) -> None:
        assert self.base in BASES, self.base
        assert self.shift in SHIFTS, self.shift
        assert self.std > 0 and self.factor > 0, (self.std, self.factor)
        assert MODE_SCALES[0] < self.scale < MODE_SCALES[1], self.scale

    def strength(self, tokens: int) -> float:
        """S of the shift, for an image of so many tokens."""
        if self.shift == "resolution":
            return math.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256))
        return self.factor if self.shift == "static" else 1.0

    def draw(self, generator: np.random.Generator, tokens: int) -> float:
        """One sigma, as float32 has it."""
        return self.sigma(generator.random(), tokens)

    def sigma(self, u: float, tokens: int) -> float:
        """The sigma of a uniform number, 0 <= u < 1, as float32 has it; `place` gives numbers that cover evenly."""
        before = self._base(u)
        S = self.strength(tokens)
        return float(np.float32(S * before / (1 + (S - 1) * before)))

    def density(self, sigma: Floats, tokens: int) -> Floats:
        """The probability density at each sigma, 0 < sigma < 1."""
        sigma = np.asarray(sigma, np.float64)
        S = self.strength(tokens)
        left = S - (S - 1) * sigma
        return S / left**2 * self._base_density(sigma / left)

    def _base(self, u: float) -> float:
        """The sigma before the shift."""
        if self.base == "logit_normal":
            z = NormalDist().inv_cdf(min(max(u, 2**-54), 1 - 2**-53))
            return 1 / (1 + math.exp(-(self.mean + self.std * z)))
        if self.base == "mode":
            return u + self.scale * (math.cos(math.pi / 2 * u) ** 2 - 1 + u)
        if self.base == "cosmap":
            return (1 + math.tan(math.pi / 2 * (u - 0.5))) / 2
        if self.base == "both_ends":
            return 1 - (1 - 2 * u) ** 3 if u < 0.5 else (2 * u - 1) ** 3
        return {"uniform": u, "high_noise": 1 - u**3, "low_noise": u**3}[self.base]

    def _base_density(self, s: Floats) -> Floats:
        """The density before the shift."""
        if self.base == "logit_normal":
            z = (np.log(s / (1 - s)) - self.mean) / self.std
            return np.exp(-(z**2) / 2) / (math.sqrt(2 * math.pi) * self.std * s * (1 - s))
        if self.base == "mode":
            return 1 / (1 + self.scale * (1 - math.pi / 2 * np.sin(math.pi * self._undo_mode(s))))
        if self.base == "cosmap":
            return 2 / (math.pi * (1 - 2 * s + 2 * s**2))
        high, low = (1 - s) ** (-2 / 3) / 3, s ** (-2 / 3) / 3
        return {"uniform": np.ones_like(s), "high_noise": high, "low_noise": low, "both_ends": (high + low) / 2}[self.base]

    def _undo_mode(self, s: Floats) -> Floats:
        """The u that `mode` maps to s, by halving: the map rises and has no closed inverse."""
        low, high = np.zeros_like(s), np.ones_like(s)
        for _ in range(53):
            u = (low + high) / 2
            above = u + self.scale * (np.cos(math.pi / 2 * u) ** 2 - 1 + u) > s
            low, high = np.where(above, low, u), np.where(above, u, high)
        return (low + high) / 2


def place(seed: int, step: int, number: int, strata: int = 1) -> float:
    """A uniform number for sample `number` of a step counted from 1, 0 <= u < 1, a function of its arguments alone.

    With n strata the numbers of n steps, from each multiple of n on, fall one into each of n equal parts, in a drawn
    order: the noise levels of a short run cover the distribution evenly. With 1 they are independent.
    """
    assert strata >= 1, strata
    inside = draws.uniform(seed, "sigma", step, number)
    if strata == 1:
        return inside
    window, turn = divmod(step - 1, strata)
    part = draws.permutation(strata, seed, "strata", window, number)[turn]
    return min((part + inside) / strata, 1 - 2**-53)
