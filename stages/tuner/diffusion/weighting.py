"""How much a sample's loss counts, by its noise level: weights over sigma, 0 (clean) to 1 (noise).

A weight multiplies the loss of a sample; it is never divided by the weights of the batch, which at batch size 1 would
leave nothing of it. Drawing often and weighing heavily teach alike on average: what is trained is the density of the
noise levels times the weight.

    none        1
    bell        exp(-2 (sigma - 1/2)^2) less its value at the ends; mean 1. ai-toolkit's linear_timesteps
    half_bell   the bell, kept at its top below sigma 1/2; mean 1.29. ai-toolkit's linear_timesteps2
    measured    ai-toolkit's `weighted`: what its author measured on another model, Flex.1; mean 1
    cosmap      2 / (pi (1 - 2 sigma + 2 sigma^2)); mean 1. Esser et al. 2024, arXiv 2403.03206, section 3.1
    sigma_sqrt  1 / sigma^2, sigma at least 0.001; no mean to speak of: nearly clean samples drown all others

The mean is over sigma uniform in 0 .. 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_ENDS = math.exp(-1 / 2)
_BELL_MEAN = math.sqrt(math.pi / 2) * math.erf(math.sqrt(1 / 2)) - _ENDS

# ai-toolkit's table has 1000 numbers, from sigma 1 down to 0.001. These points of it, joined by lines, are within 0.023
# of every one, 0.008 in the root mean square.
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
    """All alike."""
    return np.ones_like(sigma)


def bell(sigma: Floats) -> Floats:
    """Middle levels most, the ends not at all."""
    return (np.exp(-2 * (sigma - 0.5) ** 2) - _ENDS) / _BELL_MEAN


def half_bell(sigma: Floats) -> Floats:
    """Middle and low levels most, pure noise not at all."""
    return bell(np.maximum(sigma, 0.5))


def measured(sigma: Floats) -> Floats:
    """High levels most, though not pure noise; the clean end half."""
    x, y = zip(*_MEASURED, strict=True)
    found: Floats = np.interp(sigma, x, y)
    return found


def cosmap(sigma: Floats) -> Floats:
    """Middle levels twice the ends."""
    return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))


def sigma_sqrt(sigma: Floats) -> Floats:
    """The clean end beyond measure. It makes an error of the clean image one of the velocity; here the error is that already."""
    return np.maximum(sigma, 1e-3) ** -2.0


WEIGHTS: dict[str, Callable[[Floats], Floats]] = {f.__name__: f for f in (none, bell, half_bell, measured, cosmap, sigma_sqrt)}


def weight(name: str, sigma: Floats | float) -> Floats:
    """The weight of each sigma, float64. KeyError for a name that WEIGHTS lacks."""
    return WEIGHTS[name](np.asarray(sigma, np.float64))
