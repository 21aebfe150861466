"""The distribution of noise levels in training: sigma from 0 (clean image) to 1 (pure noise), defined by its density.

A noise level is drawn from a base distribution and then shifted towards noise: s' = S s / (1 + (S - 1) s), S = 1 for no shift.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from stages.tuner import draws

Floats = NDArray[np.float64]
# The density over sigma, before the shift:
#   logit_normal  normal in logit(sigma), `mean` and `std`. Esser et al. 2024, arXiv 2403.03206
#   uniform       1
#   mode          heavy tails around a mode in the middle, `scale`: the same paper, equation 20
#   cosmap        2 / (pi (1 - 2 sigma + 2 sigma^2)): the same paper, section 3.1
#   high_noise    (1 - sigma)^(-2/3) / 3, mean 3/4: composition and pose are decided there
#   low_noise     sigma^(-2/3) / 3, mean 1/4: texture and detail
#   both_ends     the mean of high_noise and low_noise
Base = Literal["logit_normal", "uniform", "mode", "cosmap", "high_noise", "low_noise", "both_ends"]
Shift = Literal["resolution", "static", "none"]

BASES: tuple[Base, ...] = get_args(Base)
SHIFTS: tuple[Shift, ...] = get_args(Shift)
MODE_SCALES = (-1.0, 2 / (math.pi - 2))  # the paper's bounds; outside them the draw of `mode` would not be monotonic


@dataclass(frozen=True)
class SigmaDistribution:
    base: Base = "uniform"
    mean: float = 0.0  # logit_normal: of the logit
    std: float = 1.0  # logit_normal: of the logit
    shift: Shift = "none"  # static: S is `factor`; resolution: S by the number of tokens
    factor: float = 1.0
    scale: float = 1.29  # mode: a larger one draws more levels near 0.5

    def __post_init__(self) -> None:
        assert self.base in BASES, self.base
        assert self.shift in SHIFTS, self.shift
        assert self.std > 0 and self.factor > 0, (self.std, self.factor)
        assert MODE_SCALES[0] < self.scale < MODE_SCALES[1], self.scale

    def shift_strength(self, tokens: int) -> float:
        """S of the module's formula. A token is 16 x 16 pixels."""
        # FLUX.1's line for ln S through (256 tokens, 0.5) and (4096 tokens, 1.15): more tokens show an image at more noise,
        # so S is 1.88 at 512 px and 3.16 at 1024 px. FLUX.2 samples with another shift, which also depends on the number of
        # steps; no known trainer trains with that one.
        if self.shift == "resolution":
            return math.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256))
        return self.factor if self.shift == "static" else 1.0

    def sigma(self, u: float, tokens: int) -> float:
        """The noise level at the quantile `u`, 0 <= u < 1, rounded to float32."""
        before = self._base_sigma(u)
        S = self.shift_strength(tokens)
        return float(np.float32(S * before / (1 + (S - 1) * before)))

    def density(self, sigma: Floats, tokens: int) -> Floats:
        sigma = np.asarray(sigma, np.float64)
        S = self.shift_strength(tokens)
        left = S - (S - 1) * sigma
        return S / left**2 * self._base_density(sigma / left)

    def _base_sigma(self, u: float) -> float:
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
        if self.base == "logit_normal":
            z = (np.log(s / (1 - s)) - self.mean) / self.std
            return np.exp(-(z**2) / 2) / (math.sqrt(2 * math.pi) * self.std * s * (1 - s))
        if self.base == "mode":
            return 1 / (1 + self.scale * (1 - math.pi / 2 * np.sin(math.pi * self._inverse_mode(s))))
        if self.base == "cosmap":
            return 2 / (math.pi * (1 - 2 * s + 2 * s**2))
        high, low = (1 - s) ** (-2 / 3) / 3, s ** (-2 / 3) / 3
        return {"uniform": np.ones_like(s), "high_noise": high, "low_noise": low, "both_ends": (high + low) / 2}[self.base]

    def _inverse_mode(self, s: Floats) -> Floats:
        # The quantile function of `mode` has no closed inverse: bisection to the last bit of a float64.
        low, high = np.zeros_like(s), np.ones_like(s)
        for _ in range(53):
            u = (low + high) / 2
            above = u + self.scale * (np.cos(math.pi / 2 * u) ** 2 - 1 + u) > s
            low, high = np.where(above, low, u), np.where(above, u, high)
        return (low + high) / 2


def stratified_uniform(seed: int, step: int, number: int, strata: int = 1) -> float:
    """In [0, 1), for sample `number` of `step`, which counts from 1; spread evenly over every `strata` successive steps."""
    assert strata >= 1, strata
    inside = draws.uniform(seed, "sigma", step, number)
    if strata == 1:
        return inside
    # Every window of `strata` steps gives one number in each of as many equal parts, in random order: a short run covers all
    # noise levels evenly.
    window, turn = divmod(step - 1, strata)
    stratum = draws.permutation(strata, seed, "strata", window, number)[turn]
    return min((stratum + inside) / strata, 1 - 2**-53)
