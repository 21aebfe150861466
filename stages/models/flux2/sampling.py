"""Draw an image: starting noise from a seed, FLUX.2's noise levels, Euler steps along them, guidance.

B batch, T text rows, J text features, L image tokens, C latent channels, h and w latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np

from stages.models.flux2.inputs import inputs
from stages.models.flux2.transformer import Flux2

Predict = Callable[..., mx.array]  # (keyword arguments of Flux2.enter) -> velocity, (batch, image tokens, channels)
Velocity = Callable[[mx.array, float], mx.array]  # (x, sigma) -> dx/dsigma, of x's shape

# (slope, offset) of mu as a line over the number of image tokens, for 10 and for 200 steps: constants of FLUX.2.
AT_10_STEPS = (8.73809524e-05, 1.89833333)
AT_200_STEPS = (0.00016927, 0.45666666)
PIXELS = 16  # per image token and latent position, along one side
TOGETHER = 1024  # up to so many image tokens, both passes of guidance run as one batch: faster, and small enough for memory
LONG = 4300  # above so many image tokens, mu is the value for 200 steps, whatever the number of steps


def draw(
    model: Flux2,
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
    """Draw one image with `model`, and yield its latent after each denoising step. A latent is a float32 array (1,
    channels, height / 16, width / 16). `text_1TJ` is the prompt's embedding, (1, text rows, features). `negative_1TJ`
    is that of the empty prompt, or None. `height` and `width` are in pixels. `seed` sets the starting noise. `steps` is
    the number of steps. `guidance` is a number such as 4.0. `predict` is a function to call in place of `model`, or
    None. `references` holds latents of reference images.

    The last latent is the finished image. Raises ValueError if `height` or `width` is not a positive multiple of 16, or
    if `steps` is less than 1.

    The image follows the prompt more closely with a larger `guidance`. With `negative_1TJ`, `guidance` is the factor of
    classifier-free guidance. Without it, `guidance` is an input of the model. `predict` gets the keyword arguments of
    `Flux2.enter`, and returns the velocity as the model does. References may have different heights and widths.
    """
    for name, pixels in (("width", width), ("height", height)):
        if pixels < PIXELS or pixels % PIXELS:
            raise ValueError(f"{name} must be a multiple of {PIXELS} pixels, got {pixels}")
    size = (height // PIXELS, width // PIXELS)
    velocity = velocity_function(model, size, text_1TJ, negative_1TJ, guidance, predict, references)
    x_1Chw = noise(seed, (1, model.config.in_channels, *size))
    yield from euler(velocity, x_1Chw, sigmas(size[0] * size[1], steps))


def velocity_function(
    model: Flux2,
    size: tuple[int, int],
    text_1TJ: mx.array,
    negative_1TJ: mx.array | None,
    guidance: float,
    predict: Predict | None = None,
    references: Sequence[mx.array] = (),
) -> Velocity:
    """Return a function `velocity(x_1Chw, sigma)` that runs `model` on one prompt. `x_1Chw` is a noisy latent, (1,
    channels, height, width). `sigma` is its noise level, from 0 (clean) to 1. The result is float32 in the shape of
    `x_1Chw`. `size` is the latent's `(height, width)`. `text_1TJ` is the prompt's embedding, (1, text rows, features).
    `negative_1TJ` is that of the empty prompt, or None. `guidance` is a number such as 4.0. `predict` is a function to
    call in place of `model`, or None. `references` holds latents of reference images.

    With `negative_1TJ`, `guidance` is the factor of classifier-free guidance. Without it, `guidance` is an input of the
    model. `predict` gets the keyword arguments of `Flux2.enter`, and returns the velocity as the model does. Both
    prompts are computed with the references.
    """
    tokens = sum(math.prod(each) for each in (size, *(latent.shape[2:] for latent in references)))
    run = predict or model

    def one_pass(text_BTJ: mx.array, x_1Chw: mx.array, sigma: float) -> mx.array:
        B = text_BTJ.shape[0]
        x_BLC = mx.repeat(x_1Chw.flatten(2).swapaxes(1, 2), B, axis=0)
        beside = [mx.repeat(latent_1Chw, B, axis=0) for latent_1Chw in references]
        v_BLC = run(**inputs(x_BLC, size, text_BTJ, mx.array([sigma] * B), guidance, beside))
        v_BChw = v_BLC.swapaxes(1, 2).reshape(B, *x_1Chw.shape[1:]).astype(mx.float32)
        mx.eval(v_BChw)  # one pass in memory at a time
        return v_BChw

    def velocity(x_1Chw: mx.array, sigma: float) -> mx.array:
        if negative_1TJ is None:
            return one_pass(text_1TJ, x_1Chw, sigma)
        if tokens <= TOGETHER:
            v_BChw = one_pass(mx.concatenate([text_1TJ, negative_1TJ]), x_1Chw, sigma)
            return classifier_free_guidance(v_BChw[:1], v_BChw[1:], guidance)
        return classifier_free_guidance(one_pass(text_1TJ, x_1Chw, sigma), one_pass(negative_1TJ, x_1Chw, sigma), guidance)

    return velocity


def empirical_mu(tokens: int, steps: int) -> float:
    """Return the number `mu` that sets how far the noise levels of FLUX.2 are shifted. A larger `mu` moves the levels
    closer to 1 (pure noise). `tokens` is the number of image tokens (16 x 16 pixels each). `steps` is the number of
    denoising steps.

    The value is interpolated between FLUX.2's constants for 10 and for 200 steps. Above `LONG` tokens, only the
    constants for 200 steps are used.
    """
    at_10, at_200 = (slope * tokens + offset for slope, offset in (AT_10_STEPS, AT_200_STEPS))
    if tokens > LONG:
        return at_200
    return at_200 + (at_200 - at_10) / 190 * (steps - 200)


def sigmas(tokens: int, steps: int) -> list[float]:
    """Return the noise levels at which an image is drawn. There are `steps` + 1 levels. They fall from 1 (noise) to 0 (clean).
    `tokens` is the number of image tokens (16 x 16 pixels each). Raises ValueError if `steps` is less than 1.

    Evenly spaced levels s are shifted to m / (m + 1 / s - 1) with m = exp(mu). `empirical_mu` computes mu.
    """
    if steps < 1:
        raise ValueError(f"steps must be >= 1, got {steps}")
    shift = math.exp(empirical_mu(tokens, steps))
    return [shift / (shift + 1 / sigma - 1) for sigma in np.linspace(1, 1 / steps, steps).tolist()] + [0.0]


def noise(seed: int, shape: Sequence[int]) -> mx.array:
    """Return Gaussian noise of mean 0 and variance 1 as a float32 array of `shape`. Equal `seed` and `shape` give equal noise
    on every machine.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    return mx.array(generator.standard_normal(tuple(shape), np.float32))


def euler(velocity: Velocity, x: mx.array, levels: Sequence[float]) -> Iterator[mx.array]:
    """Integrate `x` from the first noise level of `levels` to the last. There is one Euler step for each pair of neighbouring
    levels. Yield the new x, float32 and evaluated, after every step. `velocity(x, sigma)` returns dx / dsigma in the shape of x.
    """
    x = x.astype(mx.float32)
    for sigma, following in pairwise(levels):
        x = x + (following - sigma) * velocity(x, sigma).astype(mx.float32)
        mx.eval(x)
        yield x


def classifier_free_guidance(with_prompt: mx.array, without: mx.array, guidance: float) -> mx.array:
    """Return `without` + `guidance` * (`with_prompt` - `without`). `with_prompt` is the velocity that the model predicts from the
    prompt. `without` is the velocity that it predicts from the empty prompt. A `guidance` of 1 gives `with_prompt`.
    """
    return without + guidance * (with_prompt - without)
