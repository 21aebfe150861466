"""Losses of a predicted velocity, one per sample, for `functools.partial(function, name=array, ...)`.

All compute in float32, whatever the dtype of the model. Every keyword is an array, and an unused one is left out: this is what
`backprop.loss_and_grads` can pass to a compiled graph.

In names of arrays: B samples, L image tokens, C latent channels.
"""

from __future__ import annotations

import mlx.core as mx

LEAST_MASS = 1e-6  # a mask whose values sum to less counts as empty


def mse(v_BLC: mx.array, target_BLC: mx.array, weight_B: mx.array | None = None, mask_BL: mx.array | None = None) -> mx.array:
    """Return the mean squared error of each sample, float32, shape (batch,). v_BLC is the prediction and target_BLC its target,
    (batch, tokens, channels). `weight_B`, (batch,), multiplies each sample's loss. `mask_BL`, (batch, tokens) from 0 to 1,
    weights tokens; the weighted sum is divided by the mask's sum.
    """
    return _weighted_mean(mx.square(_difference(v_BLC, target_BLC)), weight_B, mask_BL)


def pseudo_huber(
    v_BLC: mx.array,
    target_BLC: mx.array,
    c: mx.array,
    weight_B: mx.array | None = None,
    mask_BL: mx.array | None = None,
) -> mx.array:
    """Return the mean over each sample of 2 c (sqrt(d^2 + c^2) - c), where d is prediction minus target: float32, shape
    (batch,). `c` is a scalar array; the other arguments are those of `mse`.

    The term is d^2 where |d| is far below c and 2 c |d| where it is far above, so that a learning rate means what it means for
    `mse`.
    """
    square = mx.square(_difference(v_BLC, target_BLC))
    # The same formula without the difference of two near numbers, which would lose small d; its gradient is finite at d = 0.
    return _weighted_mean(2 * c * square / (mx.sqrt(square + mx.square(c)) + c), weight_B, mask_BL)


def preservation(
    v_BLC: mx.array, base_BLC: mx.array, weight_B: mx.array | None = None, mask_BL: mx.array | None = None
) -> mx.array:
    """Return the mean squared difference of each sample's prediction v_BLC from the base model's prediction base_BLC: float32,
    shape (batch,). `base_BLC` takes no gradient; the other arguments are those of `mse`.

    Added to the loss, it holds the adapted model to the base: with the class word in place of the trigger it is differential
    output preservation, with an inverted mask, 1 - mask_BL, it holds the background.
    """
    return _weighted_mean(mx.square(_difference(v_BLC, base_BLC)), weight_B, mask_BL)


def _difference(v_BLC: mx.array, target_BLC: mx.array) -> mx.array:
    return v_BLC.astype(mx.float32) - target_BLC.astype(mx.float32)


def _weighted_mean(each_BLC: mx.array, weight_B: mx.array | None, mask_BL: mx.array | None) -> mx.array:
    """Return the mean over a sample's tokens and channels, tokens weighted by the mask, times the sample's weight: (batch,)."""
    # Each value is divided before the sum: dividing the sum would be a kernel of its own, which a GPU compiles for seconds.
    share = 1 / (each_BLC.shape[1] * each_BLC.shape[2])
    losses_B = mx.sum(share * each_BLC, axis=(1, 2)) if mask_BL is None else _masked_mean(each_BLC, mask_BL)
    return losses_B if weight_B is None else weight_B * losses_B


def _masked_mean(each_BLC: mx.array, mask_BL: mx.array) -> mx.array:
    """Return the mean over channels and, weighted by the mask, over tokens: (batch,). An empty mask gives a loss and a gradient
    of zero.
    """
    each_BL = mx.mean(each_BLC, axis=2)
    return mx.sum(mask_BL * each_BL, axis=1) / mx.maximum(mx.sum(mask_BL, axis=1), LEAST_MASS)
