"""What the tuner knows of diffusion: which noise levels are trained, and how a prediction's error is weighted and measured.

Sigma goes from 0 (clean image) to 1 (pure noise). A noise level is drawn from a base distribution and then shifted towards
noise: s' = S s / (1 + (S - 1) s), S = 1 for no shift. In names of arrays: B samples, L image tokens, C latent channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, get_args

import mlx.core as mx
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


# Weight of a sample's loss by its noise level. Means are over uniform sigma

WeightName = Literal["none", "bell", "half_bell", "measured", "cosmap", "sigma_sqrt"]

_ENDS = math.exp(-1 / 2)
_BELL_MEAN = math.sqrt(math.pi / 2) * math.erf(math.sqrt(1 / 2)) - _ENDS

# Points of ai-toolkit's table, which has 1000 numbers from sigma 1 down to 0.001. Linear interpolation between them is within
# 0.023 of each number, with a root mean square error of 0.008.
_MEASURED = (
    (0.0, 0.447),
    (0.015, 0.461),
    (0.05, 0.582),
    (0.1, 0.716),
    (0.12, 0.731),
    (0.28, 0.723),
    (0.4, 0.805),
    (0.55, 1.0),
    (0.68, 1.227),
    (0.8, 1.441),
    (0.87, 1.518),
    (0.92, 1.476),
    (0.955, 1.356),
    (0.985, 1.121),
    (1.0, 0.906),
)


def none(sigma: Floats) -> Floats:
    return np.ones_like(sigma)


def bell(sigma: Floats) -> Floats:
    """exp(-2 (sigma - 1/2)^2) less its value at the ends; mean 1. ai-toolkit's linear_timesteps."""
    return (np.exp(-2 * (sigma - 0.5) ** 2) - _ENDS) / _BELL_MEAN


def half_bell(sigma: Floats) -> Floats:
    """The bell, constant at its top below sigma 1/2; mean 1.29. ai-toolkit's linear_timesteps2."""
    return bell(np.maximum(sigma, 0.5))


def measured(sigma: Floats) -> Floats:
    """ai-toolkit's `weighted`, measured by its author on another model, Flex.1; mean 1."""
    x, y = zip(*_MEASURED, strict=True)
    weights: Floats = np.interp(sigma, x, y)
    return weights


def cosmap(sigma: Floats) -> Floats:
    """Mean 1. Esser et al. 2024, arXiv 2403.03206, section 3.1."""
    return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))


def sigma_sqrt(sigma: Floats) -> Floats:
    """1 / sigma^2, despite diffusers' name for it. Nearly clean samples outweigh all others by far."""
    # It turns an error of the predicted image into one of the velocity, but the loss here is the velocity's already.
    return np.maximum(sigma, 1e-3) ** -2.0


# Not divided by the sum of the batch's weights, which at batch size 1 would cancel a weight. Drawing a noise level often and
# weighting it heavily train alike on average: what counts is the density of the noise levels times the weight.
WEIGHTS: dict[str, Callable[[Floats], Floats]] = {f.__name__: f for f in (none, bell, half_bell, measured, cosmap, sigma_sqrt)}


def weight(name: str, sigma: Floats | float) -> Floats:
    return WEIGHTS[name](np.asarray(sigma, np.float64))


# Losses of a predicted velocity, one per sample, in float32 whatever the dtype of the model. Every keyword is an array, for the
# `functools.partial(function, name=array)` that `backprop.loss_and_grads` compiles. `mask_BL` holds weights from 0 to 1

LEAST_MASS = 1e-6  # a mask whose values sum to less counts as empty


def mse(v_BLC: mx.array, target_BLC: mx.array, weight_B: mx.array | None = None, mask_BL: mx.array | None = None) -> mx.array:
    """With the base model's prediction as the target, it keeps the adapted model close to that one."""
    return _weighted_mean(mx.square(_difference(v_BLC, target_BLC)), weight_B, mask_BL)


def pseudo_huber(
    v_BLC: mx.array,
    target_BLC: mx.array,
    c: mx.array,
    weight_B: mx.array | None = None,
    mask_BL: mx.array | None = None,
) -> mx.array:
    """Mean of 2 c (sqrt(d^2 + c^2) - c): d^2 for |d| far below c, so the learning rate means the same as for `mse`."""
    square = mx.square(_difference(v_BLC, target_BLC))
    # The same formula without the difference of two near numbers, which would lose small d; its gradient is finite at d = 0.
    return _weighted_mean(2 * c * square / (mx.sqrt(square + mx.square(c)) + c), weight_B, mask_BL)


def moved(v_BLC: mx.array, positive_BLC: mx.array, negative_BLC: mx.array, guidance: float) -> mx.array:
    """The target of a slider: a prediction moved along the difference of two others. Gandikota et al. 2023, arXiv 2311.12092."""
    return v_BLC.astype(mx.float32) + guidance * _difference(positive_BLC, negative_BLC)


def _difference(v_BLC: mx.array, target_BLC: mx.array) -> mx.array:
    return v_BLC.astype(mx.float32) - target_BLC.astype(mx.float32)


def _weighted_mean(each_BLC: mx.array, weight_B: mx.array | None, mask_BL: mx.array | None) -> mx.array:
    # Each value is divided before the sum: dividing the sum would be a kernel of its own, which a GPU compiles for seconds.
    share = 1 / (each_BLC.shape[1] * each_BLC.shape[2])
    if mask_BL is None:
        losses_B = mx.sum(share * each_BLC, axis=(1, 2))
    else:
        # A sample whose mask is empty has the loss and the gradient 0.
        losses_B = mx.sum(mask_BL * mx.mean(each_BLC, axis=2), axis=1) / mx.maximum(mx.sum(mask_BL, axis=1), LEAST_MASS)
    return losses_B if weight_B is None else weight_B * losses_B
