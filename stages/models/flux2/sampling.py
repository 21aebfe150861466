"""FLUX.2's noise levels."""

from __future__ import annotations

import math

import numpy as np

# (slope, offset) of mu as a line over the number of image tokens, for 10 and for 200 steps: constants of FLUX.2.
AT_10_STEPS = (8.73809524e-05, 1.89833333)
AT_200_STEPS = (0.00016927, 0.45666666)
LONG = 4300  # above so many image tokens, mu is the value for 200 steps, whatever the number of steps


def sigmas(tokens: int, steps: int) -> list[float]:
    """Noise levels from 1 to 0: even levels s become m / (m + 1 / s - 1), m = exp(mu). Raises ValueError if steps < 1."""
    if steps < 1:
        raise ValueError(f"steps must be >= 1, got {steps}")
    # mu shifts the levels towards 1. It lies between FLUX.2's constants for 10 and 200 steps; above `LONG` it is the latter.
    at_10, at_200 = (slope * tokens + offset for slope, offset in (AT_10_STEPS, AT_200_STEPS))
    shift = math.exp(at_200 if tokens > LONG else at_200 + (at_200 - at_10) / 190 * (steps - 200))
    return [shift / (shift + 1 / sigma - 1) for sigma in np.linspace(1, 1 / steps, steps).tolist()] + [0.0]
