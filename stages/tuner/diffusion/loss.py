"""Losses of a predicted velocity, one per sample, in float32 whatever the dtype of the model.

Every keyword is an array, for the `functools.partial(function, name=array)` that `backprop.loss_and_grads` compiles.
`mask_BL` holds weights from 0 to 1. In names of arrays: B samples, L image tokens, C latent channels.
"""

from __future__ import annotations

import mlx.core as mx

LEAST_MASS = 1e-6  # a mask whose values sum to less counts as empty


def mse(v_BLC: mx.array, target_BLC: mx.array, weight_B: mx.array | None = None, mask_BL: mx.array | None = None) -> mx.array:
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


def preservation(
    v_BLC: mx.array, base_BLC: mx.array, weight_B: mx.array | None = None, mask_BL: mx.array | None = None
) -> mx.array:
    """Mean squared difference from the base model's prediction, to keep the adapted model close to it."""
    # With the class word in place of the trigger word it is differential output preservation. With an inverted mask, 1 -
    # mask, it preserves the background.
    return _weighted_mean(mx.square(_difference(v_BLC, base_BLC)), weight_B, mask_BL)


def _difference(v_BLC: mx.array, target_BLC: mx.array) -> mx.array:
    return v_BLC.astype(mx.float32) - target_BLC.astype(mx.float32)


def _weighted_mean(each_BLC: mx.array, weight_B: mx.array | None, mask_BL: mx.array | None) -> mx.array:
    # Each value is divided before the sum: dividing the sum would be a kernel of its own, which a GPU compiles for seconds.
    share = 1 / (each_BLC.shape[1] * each_BLC.shape[2])
    losses_B = mx.sum(share * each_BLC, axis=(1, 2)) if mask_BL is None else _masked_mean(each_BLC, mask_BL)
    return losses_B if weight_B is None else weight_B * losses_B


def _masked_mean(each_BLC: mx.array, mask_BL: mx.array) -> mx.array:
    each_BL = mx.mean(each_BLC, axis=2)
    # A sample whose mask is empty has the loss and the gradient 0.
    return mx.sum(mask_BL * each_BL, axis=1) / mx.maximum(mx.sum(mask_BL, axis=1), LEAST_MASS)
