"""Losses of a predicted velocity, one per sample, for `functools.partial(function, name=array, ...)`.

All compute in float32, whatever the dtype of the model. Every keyword is an array, and an unused one is left out: this is what
`backprop.loss_and_grads` can pass to a compiled graph.

In names of arrays: B samples, L image tokens, C latent channels.
"""

from __future__ import annotations

import mlx.core as mx

LEAST_MASS = 1e-6  # a mask whose values sum to less counts as empty


def mse(v_BLC: mx.array, target_BLC: mx.array, weight_B: mx.array | None = None, mask_BL: mx.array | None = None) -> mx.array:
    """Return the mean squared error of each sample in a batch, as a float32 array of shape `(batch,)`. `v_BLC` is the
    model's prediction. `target_BLC` is the value that it should have. Both have the shape `(batch, tokens, channels)`.
    `weight_B`, with the shape `(batch,)`, multiplies each sample's loss. `mask_BL`, with the shape `(batch, tokens)`,
    is the weight of each token in the mean, from 0 to 1. If `weight_B` or `mask_BL` is None, all its weights are equal
    to 1.
    """
    return _weighted_mean(mx.square(_difference(v_BLC, target_BLC)), weight_B, mask_BL)


def pseudo_huber(
    v_BLC: mx.array,
    target_BLC: mx.array,
    c: mx.array,
    weight_B: mx.array | None = None,
    mask_BL: mx.array | None = None,
) -> mx.array:
    """Return the pseudo-Huber loss of each sample in a batch, as a float32 array `(batch,)`. The loss is the mean of `2
    c (sqrt(d^2 + c^2) - c)`, where `d` is `v_BLC` minus `target_BLC`. `v_BLC` is the prediction and `target_BLC` the
    target, both `(batch, tokens, channels)`. `c` is a scalar array. `weight_B`, `(batch,)`, multiplies the loss of each
    sample. `mask_BL`, `(batch, tokens)`, holds the weight of each token in the mean, from 0 to 1. None means weights of
    1.

    The term is d^2 if |d| is far below c, and 2 c |d| if |d| is far above. A learning rate therefore means the same as
    for `mse`.
    """
    square = mx.square(_difference(v_BLC, target_BLC))
    # The same formula without the difference of two near numbers, which would lose small d; its gradient is finite at d = 0.
    return _weighted_mean(2 * c * square / (mx.sqrt(square + mx.square(c)) + c), weight_B, mask_BL)


def preservation(
    v_BLC: mx.array, base_BLC: mx.array, weight_B: mx.array | None = None, mask_BL: mx.array | None = None
) -> mx.array:
    """Return the mean squared difference of two predictions for each sample, as a float32 array `(batch,)`. `v_BLC` is
    the prediction of the adapted model. `base_BLC` is that of the base model, computed beforehand. Both are `(batch,
    tokens, channels)`. `weight_B`, `(batch,)`, multiplies the loss of each sample. `mask_BL`, `(batch, tokens)`, holds
    the weight of each token in the mean, from 0 to 1. None means weights of 1.

    Added to the training loss, it keeps the adapted model close to the base model. With the class word in place of the
    trigger word it is differential output preservation. With an inverted mask, 1 - `mask_BL`, it preserves the
    background.
    """
    return _weighted_mean(mx.square(_difference(v_BLC, base_BLC)), weight_B, mask_BL)


def _difference(v_BLC: mx.array, target_BLC: mx.array) -> mx.array:
    return v_BLC.astype(mx.float32) - target_BLC.astype(mx.float32)


def _weighted_mean(each_BLC: mx.array, weight_B: mx.array | None, mask_BL: mx.array | None) -> mx.array:
    """Return one loss per sample, shape (batch,). It is the mean of `each_BLC` (batch, tokens, channels) over tokens
    and channels. `mask_BL` (batch, tokens) holds the weights of the tokens in this mean. `weight_B` (batch,) holds a
    factor for each sample's loss. If `mask_BL` or `weight_B` is None, its weights are equal to 1.
    """
    # Each value is divided before the sum: dividing the sum would be a kernel of its own, which a GPU compiles for seconds.
    share = 1 / (each_BLC.shape[1] * each_BLC.shape[2])
    losses_B = mx.sum(share * each_BLC, axis=(1, 2)) if mask_BL is None else _masked_mean(each_BLC, mask_BL)
    return losses_B if weight_B is None else weight_B * losses_B


def _masked_mean(each_BLC: mx.array, mask_BL: mx.array) -> mx.array:
    """Return one weighted mean per sample, shape (batch,). `each_BLC` (batch, tokens, channels) is averaged over
    channels and tokens. `mask_BL` (batch, tokens) holds the weights of the tokens. If all weights of a sample are 0,
    its mean and its gradient are 0.
    """
    each_BL = mx.mean(each_BLC, axis=2)
    return mx.sum(mask_BL * each_BL, axis=1) / mx.maximum(mx.sum(mask_BL, axis=1), LEAST_MASS)
