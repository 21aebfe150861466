"""How much a sample's loss counts, by its noise level sigma: 0 is a clean image, 1 pure noise.

A weight multiplies the loss of its sample. It is not divided by the sum of the batch's weights, which at batch size 1 would
cancel it. Drawing a noise level often and weighting it heavily train alike on average: what counts is the density of the noise
levels times the weight.

    none        1
    bell        exp(-2 (sigma - 1/2)^2) less its value at the ends; mean 1. ai-toolkit's linear_timesteps
    half_bell   the bell, constant at its top below sigma 1/2; mean 1.29. ai-toolkit's linear_timesteps2
    measured    ai-toolkit's `weighted`: what its author measured on another model, Flex.1; mean 1
    cosmap      2 / (pi (1 - 2 sigma + 2 sigma^2)); mean 1. Esser et al. 2024, arXiv 2403.03206, section 3.1
    sigma_sqrt  1 / sigma^2, sigma at least 0.001; nearly clean samples outweigh all others by far

The means are over sigma uniform in 0 .. 1.
"""

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
    """Return the loss weight 1 for each noise level in `sigma`, an array of values from 0 (clean) to 1 (noise)."""
    return np.ones_like(sigma)


def bell(sigma: Floats) -> Floats:
    """Return a loss weight for each noise level in `sigma`, an array of values from 0 (clean) to 1 (noise). The weights form a
    bell. Its centre is at sigma 0.5, and it falls to 0 at both ends. The mean over sigma is 1.
    """
    return (np.exp(-2 * (sigma - 0.5) ** 2) - _ENDS) / _BELL_MEAN


def half_bell(sigma: Floats) -> Floats:
    """Return a loss weight for each noise level in `sigma`, an array of values from 0 (clean) to 1 (noise). The weight is
    constant up to sigma 0.5. It then falls like a bell to 0 at sigma 1. The mean over sigma is 1.29.
    """
    return bell(np.maximum(sigma, 0.5))


def measured(sigma: Floats) -> Floats:
    """Return a loss weight for each noise level in `sigma`, an array of values from 0 (clean) to 1 (noise). The weights are
    interpolated in a table that was measured on another model. The weight is 0.45 at sigma 0, at most 1.5 (at sigma 0.87) and 0.9
    at sigma 1. The mean over sigma is 1.
    """
    x, y = zip(*_MEASURED, strict=True)
    weights: Floats = np.interp(sigma, x, y)
    return weights


def cosmap(sigma: Floats) -> Floats:
    """Return a loss weight for each noise level in `sigma`, an array of values from 0 (clean) to 1 (noise). The formula is 2 /
    (pi (1 - 2 sigma + 2 sigma^2)). The weight is 1.27 at sigma 0.5 and 0.64 at both ends. The mean over sigma is 1.
    """
    return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))


def sigma_sqrt(sigma: Floats) -> Floats:
    """Return the loss weight 1 / sigma^2 for each noise level in `sigma`, an array of values from 0 (clean) to 1
    (noise). Values below 0.001 count as 0.001, so the largest weight is a million. The name `sigma_sqrt` is the name of
    this weighting in diffusers. It does not describe the formula, which has no square root.

    The weight turns an error of the predicted image into an error of the velocity. Here the loss is that of the
    velocity already.
    """
    return np.maximum(sigma, 1e-3) ** -2.0


WEIGHTS: dict[str, Callable[[Floats], Floats]] = {f.__name__: f for f in (none, bell, half_bell, measured, cosmap, sigma_sqrt)}


def weight(name: str, sigma: Floats | float) -> Floats:
    """Return the loss weight of each noise level in `sigma`, as a float64 array. A sample's loss is multiplied by the weight of
    its noise level. `name` is the name of the weighting, a key of WEIGHTS such as "bell". `sigma` has values from 0 (clean) to 1
    (noise). Raises KeyError if `name` is unknown.
    """
    return WEIGHTS[name](np.asarray(sigma, np.float64))
