"""Weight of a sample's loss by its noise level sigma: 0 is a clean image, 1 pure noise. Means are over uniform sigma."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
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
