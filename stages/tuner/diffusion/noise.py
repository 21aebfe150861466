"""The distribution of noise levels in training: sigma from 0 (clean image) to 1 (pure noise), defined by its density.

A noise level is drawn from a base distribution and then shifted towards noise: s' = S s / (1 + (S - 1) s), with S = 1 for no
shift. The shift by resolution takes S = exp(mu), with mu on FLUX.1's line through (256 tokens, 0.5) and (4096 tokens, 1.15):
more tokens show an image at more noise, so S is 1.88 at 512 px and 3.16 at 1024 px. FLUX.2 samples with another shift, which
depends on the number of steps too; no known trainer trains with that one.

The base distributions by their density over sigma, before the shift:

    logit_normal  normal in logit(sigma), `mean` and `std`. Esser et al. 2024, arXiv 2403.03206
    uniform       1
    mode          heavy tails around a mode in the middle, `scale`: the same paper, equation 20
    cosmap        2 / (pi (1 - 2 sigma + 2 sigma^2)): the same paper, section 3.1
    high_noise    (1 - sigma)^(-2/3) / 3, mean 3/4: composition and pose are decided there
    low_noise     sigma^(-2/3) / 3, mean 1/4: texture and detail
    both_ends     the mean of high_noise and low_noise
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
Base = Literal["logit_normal", "uniform", "mode", "cosmap", "high_noise", "low_noise", "both_ends"]
Shift = Literal["resolution", "static", "none"]

BASES: tuple[Base, ...] = get_args(Base)
SHIFTS: tuple[Shift, ...] = get_args(Shift)
MODE_SCALES = (-1.0, 2 / (math.pi - 2))  # the paper's bounds; outside them the draw of `mode` would not be monotonic


@dataclass(frozen=True)
class SigmaDistribution:
    """A distribution of noise levels, from 0 (clean image) to 1 (pure noise). A level is first drawn from the distribution
    `base`, such as "uniform". It is then shifted. `shift` is "none", "static" (the same shift for all images) or "resolution"
    (more noise for larger images). Raises AssertionError if a value is out of range.

    `base` is "uniform", "logit_normal", "mode", "cosmap", "high_noise", "low_noise" or "both_ends".

    With the base "logit_normal", the logit of a level has the mean `mean` and the standard deviation `std`. With the base
    "mode", a larger `scale` draws more levels near 0.5. `scale` must be above -1 and below 1.75. With the shift "static",
    `factor` is the strength of the shift. A strength above 1 gives more noise, and 1 changes nothing.
    """

    base: Base = "uniform"
    mean: float = 0.0
    std: float = 1.0
    shift: Shift = "none"
    factor: float = 1.0
    scale: float = 1.29

    def __post_init__(self) -> None:
        assert self.base in BASES, self.base
        assert self.shift in SHIFTS, self.shift
        assert self.std > 0 and self.factor > 0, (self.std, self.factor)
        assert MODE_SCALES[0] < self.scale < MODE_SCALES[1], self.scale

    def shift_strength(self, tokens: int) -> float:
        """Return the strength S of the shift towards noise for an image of `tokens` tokens. A token is 16 x 16 pixels. The shift
        maps a noise level sigma to S sigma / (1 + (S - 1) sigma). S = 1 is no shift.
        """
        if self.shift == "resolution":
            return math.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256))
        return self.factor if self.shift == "static" else 1.0

    def sigma(self, u: float, tokens: int) -> float:
        """Map a uniform random number `u`, `0 <= u < 1`, to a noise level of this distribution. `tokens` is the number
        of image tokens. It matters only if `shift` is "resolution". The result is from 0 (clean) to 1 (noise), rounded
        to float32.
        """
        before = self._base_sigma(u)
        S = self.shift_strength(tokens)
        return float(np.float32(S * before / (1 + (S - 1) * before)))

    def density(self, sigma: Floats, tokens: int) -> Floats:
        """Return the probability density of this noise distribution at each level in `sigma`. The result has the shape
        of `sigma`. `sigma` is an array of noise levels from 0 (clean) to 1 (noise). `tokens` is the number of tokens of
        the image. It has an effect only if the attribute `shift` is "resolution".
        """
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
        """Return the number `u` that belongs to each noise level in `s`, as an array of the shape of `s`. A number `u`
        from 0 to 1 belongs to the noise level `u + scale (cos(pi u / 2)^2 - 1 + u)`. Here `scale` is the attribute
        `self.scale`. The noise levels in `s` are from 0 to 1.

        With the base distribution "mode", a noise level is computed by this formula from a uniform random number `u`,
        and is then shifted. `s` holds noise levels before the shift. The inverse of the formula has no closed form, so
        it is found by bisection.
        """
        low, high = np.zeros_like(s), np.ones_like(s)
        for _ in range(53):
            u = (low + high) / 2
            above = u + self.scale * (np.cos(math.pi / 2 * u) ** 2 - 1 + u) > s
            low, high = np.where(above, low, u), np.where(above, u, high)
        return (low + high) / 2


def stratified_uniform(seed: int, step: int, number: int, strata: int = 1) -> float:
    """Return a random number `u`, `0 <= u < 1`, for one sample of a training step. `seed` is the integer seed of the
    run. `step` counts from 1. `number` is the index of the sample in the step. If `strata` is 1, the results of
    different steps are independent. If `strata` is larger, the results of every `strata` steps are spread evenly. For
    example, with 4 strata and one `number`, steps 1 to 4 give one result in each quarter of the range from 0 to 1, and
    steps 5 to 8 again. Equal arguments give equal results.

    The range is divided into `strata` equal parts. For each `number`, steps 1 to `strata` give one result in each part,
    in random order. The same holds for each later group of `strata` steps. A short run thus covers all noise levels
    evenly.
    """
    assert strata >= 1, strata
    inside = draws.uniform(seed, "sigma", step, number)
    if strata == 1:
        return inside
    window, turn = divmod(step - 1, strata)
    stratum = draws.permutation(strata, seed, "strata", window, number)[turn]
    return min((stratum + inside) / strata, 1 - 2**-53)
