"""Draw an image: starting noise from a seed, Euler steps along the noise levels of an architecture, guidance.

B batch, T text rows, J text features, L image tokens, C latent channels, h and w latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.layers import tokens

Predict = Callable[..., mx.array]  # (keyword arguments of `Transformer.enter`) -> velocity, (batch, image tokens, channels)
Velocity = Callable[[mx.array, float, float], mx.array]  # (x, sigma, the next sigma) -> dx/dsigma, of x's shape

PIXELS = 16  # per image token and latent position, along one side
TOGETHER = 1024  # up to so many image tokens, both passes of guidance run as one batch: faster, and small enough for memory


def draw(
    inputs: Callable[..., dict[str, Any]],
    levels: Callable[[int, int], list[float]],
    model: Any,
    text_1TJ: mx.array,
    height: int,
    width: int,
    *,
    seed: int,
    steps: int,
    guidance: float,
    negative_1TJ: mx.array | None = None,
    predict: Predict | None = None,
    references: Sequence[mx.array] = (),
) -> Iterator[mx.array]:
    """`inputs` and `levels` are those of `Architecture`, the latter its `sigmas`; the rest is as in `Architecture.draw`."""
    for name, pixels in (("width", width), ("height", height)):
        if pixels < PIXELS or pixels % PIXELS:
            raise ValueError(f"{name} must be a multiple of {PIXELS} pixels, got {pixels}")
    size = (height // PIXELS, width // PIXELS)
    velocity = velocity_function(inputs, model, size, text_1TJ, negative_1TJ, guidance, predict, references)
    x_1Chw = noise(seed, (1, model.config.latent_channels, *size))
    yield from euler(velocity, x_1Chw, levels(size[0] * size[1], steps))


def velocity_function(
    inputs: Callable[..., dict[str, Any]],
    model: Any,
    size: tuple[int, int],
    text_1TJ: mx.array,
    negative_1TJ: mx.array | None,
    guidance: float,
    predict: Predict | None = None,
    references: Sequence[mx.array] = (),
) -> Velocity:
    """The velocity with one prompt. With `negative_1TJ` guidance is classifier-free, else an input of the model."""
    # References count too: they lengthen the sequence of both passes.
    tokens_in_all = sum(math.prod(each) for each in (size, *(latent.shape[2:] for latent in references)))
    run = predict or model

    def one_pass(text_BTJ: mx.array, x_1Chw: mx.array, sigma: float, following: float) -> mx.array:
        B = text_BTJ.shape[0]
        x_BLC = mx.repeat(tokens(x_1Chw), B, axis=0)
        beside = [mx.repeat(latent_1Chw, B, axis=0) for latent_1Chw in references]
        sigma_B, target_B = mx.array([sigma] * B), mx.array([following] * B)
        v_BLC = run(**inputs(x_BLC, size, text_BTJ, sigma_B, guidance, beside, target_B=target_B))
        v_BChw = v_BLC.swapaxes(1, 2).reshape(B, *x_1Chw.shape[1:]).astype(mx.float32)
        mx.eval(v_BChw)  # one pass in memory at a time
        return v_BChw

    def velocity(x_1Chw: mx.array, *levels: float) -> mx.array:
        if negative_1TJ is None:
            return one_pass(text_1TJ, x_1Chw, *levels)
        if tokens_in_all <= TOGETHER and text_1TJ.shape == negative_1TJ.shape:
            v_BChw = one_pass(mx.concatenate([text_1TJ, negative_1TJ]), x_1Chw, *levels)
            with_prompt, without = v_BChw[:1], v_BChw[1:]
        else:
            with_prompt, without = (one_pass(text, x_1Chw, *levels) for text in (text_1TJ, negative_1TJ))
        return without + guidance * (with_prompt - without)

    return velocity


def shifted(tokens: int, steps: int, shift: float) -> list[float]:
    """Noise levels from 1 to 0, of one shift for all sizes: even levels u become shift u / (1 + (shift - 1) u). Raises ValueError
    if steps < 1.
    """
    if steps < 1:
        raise ValueError(f"steps must be >= 1, got {steps}")
    return [shift * u / (1 + (shift - 1) * u) for u in np.linspace(1, 1 / steps, steps).tolist()] + [0.0]


def noise(seed: int, shape: Sequence[int]) -> mx.array:
    """Standard normal, float32; equal for one seed on every machine."""
    generator = np.random.Generator(np.random.Philox(seed))
    return mx.array(generator.standard_normal(tuple(shape), np.float32))


def euler(velocity: Velocity, x: mx.array, levels: Sequence[float]) -> Iterator[mx.array]:
    """Yield x, float32 and evaluated, after each Euler step along `levels`."""
    x = x.astype(mx.float32)
    for sigma, following in pairwise(levels):
        x = x + (following - sigma) * velocity(x, sigma, following).astype(mx.float32)
        mx.eval(x)
        yield x
