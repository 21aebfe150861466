"""Losses of a predicted velocity, one per sample, for `functools.partial(function, name=array, ...)`.

All compute in float32, whatever the dtype of the model. Every keyword is an array, and an unused one is left out: this is what
`backprop.loss_and_grads` can pass to a compiled graph.

In names of arrays: B samples, L image tokens, C latent channels.
"""

from __future__ import annotations

import mlx.core as mx

LEAST_MASS = 1e-6  # a mask whose values sum to less counts as empty


def mse(v_BLC: mx.array, target_BLC: mx.array, weight_B: mx.array | None = None, mask_BL: mx.array | None = None) -> mx.array:
    """Return the mean squared error of each sample in a batch, float32, shape (batch,). v_BLC is the model's prediction and
    target_BLC the value it should have; both have the shape (batch, tokens, channels). `weight_B`, shape (batch,), multiplies
    each sample's loss. `mask_BL`, shape (batch, tokens) with values from 0 to 1, makes the mean over tokens a weighted one.
    None leaves out the weights or the mask.
    """
    return _weighted_mean(mx.square(_difference(v_BLC, target_BLC)), weight_B, mask_BL)


def pseudo_huber(
    v_BLC: mx.array,
    target_BLC: mx.array,
    c: mx.array,
    weight_B: mx.array | None = None,
    mask_BL: mx.array | None = None,
) -> mx.array:
    """Return the pseudo-Huber loss of each sample in a batch, float32, shape (batch,): the mean of 2 c (sqrt(d^2 + c^2) - c),
    where d is prediction minus target. `c`, a scalar array, is the error from which the loss grows linearly. v_BLC is the
    prediction and target_BLC its target, both (batch, tokens, channels). `weight_B`, shape (batch,), multiplies each sample's
    loss. `mask_BL`, shape (batch, tokens) with values from 0 to 1, weights the tokens.

    The term is d^2 if |d| is far below c, and 2 c |d| if |d| is far above. A learning rate therefore means the same as for
    `mse`.
    """
    square = mx.square(_difference(v_BLC, target_BLC))
    # The same formula without the difference of two near numbers, which would lose small d; its gradient is finite at d = 0.
    return _weighted_mean(2 * c * square / (mx.sqrt(square + mx.square(c)) + c), weight_B, mask_BL)


def preservation(
    v_BLC: mx.array, base_BLC: mx.array, weight_B: mx.array | None = None, mask_BL: mx.array | None = None
) -> mx.array:
    """Return the preservation loss of each sample in a batch, float32, shape (batch,). It is the mean squared difference
    between the prediction v_BLC of the adapted model and the prediction base_BLC of the base model; both have the shape
    (batch, tokens, channels). base_BLC is computed beforehand and is a constant here. `weight_B`, shape (batch,), multiplies
    each sample's loss. `mask_BL`, shape (batch, tokens) with values from 0 to 1, weights the tokens.

    Added to the training loss, it keeps the adapted model close to the base model. With the class word in place of the trigger
    word it is differential output preservation. With an inverted mask, 1 - mask_BL, it preserves the background.
    """
    return _weighted_mean(mx.square(_difference(v_BLC, base_BLC)), weight_B, mask_BL)


def _difference(v_BLC: mx.array, target_BLC: mx.array) -> mx.array:
    return v_BLC.astype(mx.float32) - target_BLC.astype(mx.float32)


def _weighted_mean(each_BLC: mx.array, weight_B: mx.array | None, mask_BL: mx.array | None) -> mx.array:
    """Return the loss of each sample, shape (batch,): the mean of each_BLC (batch, tokens, channels) over tokens and channels,
    times the sample's weight. `mask_BL` weights the tokens; None weights all alike.
    """
    # Each value is divided before the sum: dividing the sum would be a kernel of its own, which a GPU compiles for seconds.
    share = 1 / (each_BLC.shape[1] * each_BLC.shape[2])
    losses_B = mx.sum(share * each_BLC, axis=(1, 2)) if mask_BL is None else _masked_mean(each_BLC, mask_BL)
    return losses_B if weight_B is None else weight_B * losses_B


def _masked_mean(each_BLC: mx.array, mask_BL: mx.array) -> mx.array:
    """Return the mean of each_BLC (batch, tokens, channels) over channels and tokens, shape (batch,). `mask_BL` weights the
    tokens. An empty mask gives a loss and a gradient of zero.
    """
    each_BL = mx.mean(each_BLC, axis=2)
    return mx.sum(mask_BL * each_BL, axis=1) / mx.maximum(mx.sum(mask_BL, axis=1), LEAST_MASS)
