"""Drawing an image: FLUX.2's noise levels, Euler's steps through them, guidance, and noise that a seed names.

B batch, C latent channels, H and W latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np

Velocity = Callable[[mx.array, float], mx.array]  # (x, sigma) -> dx/dsigma, of x's shape

# The empirical mu of the FLUX.2 reference: two lines over the number of image tokens, fitted at 10 and at 200 steps.
AT_10_STEPS = (8.73809524e-05, 1.89833333)
AT_200_STEPS = (0.00016927, 0.45666666)
LONG = 4300  # image tokens beyond which the line of 200 steps holds for any number of steps


def empirical_mu(tokens: int, steps: int) -> float:
    """How far the schedule leans to noise, for an image of that many tokens drawn in that many steps."""
    at_10, at_200 = (slope * tokens + offset for slope, offset in (AT_10_STEPS, AT_200_STEPS))
    if tokens > LONG:
        return at_200
    return at_200 + (at_200 - at_10) / 190 * (steps - 200)


def sigmas(tokens: int, steps: int) -> list[float]:
    """The noise levels from 1 down to 0, steps + 1 of them: evenly spaced, then shifted by exp(mu)."""
    if steps < 1:
        raise ValueError(f"an image is drawn in 1 step or more, not {steps}")
    shift = math.exp(empirical_mu(tokens, steps))
    return [shift / (shift + 1 / sigma - 1) for sigma in np.linspace(1, 1 / steps, steps).tolist()] + [0.0]


def noise(seed: int, shape: Sequence[int]) -> mx.array:
    """Unit Gaussian, float32: the same for a seed and shape on every machine and backend."""
    generator = np.random.Generator(np.random.Philox(seed))
    return mx.array(generator.standard_normal(tuple(shape), np.float32))


def euler(velocity: Velocity, x: mx.array, levels: Sequence[float]) -> Iterator[mx.array]:
    """BlockwiseBackprop from the first noise level to the last, in float32; yields x after every step, evaluated."""
    x = x.astype(mx.float32)
    for sigma, following in pairwise(levels):
        x = x + (following - sigma) * velocity(x, sigma).astype(mx.float32)
        mx.eval(x)
        yield x


def sample(velocity: Velocity, x: mx.array, levels: Sequence[float]) -> mx.array:
    """Where Euler's steps from `x`, noise, end: the drawn latents."""
    *_, drawn = euler(velocity, x, levels)
    return drawn


def guided(with_prompt: mx.array, without: mx.array, guidance: float) -> mx.array:
    """Classifier-free guidance: beyond the velocity with the prompt, away from the one with the empty prompt."""
    return without + guidance * (with_prompt - without)
