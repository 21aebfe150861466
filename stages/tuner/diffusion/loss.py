"""What a prediction costs, per sample: functions of arrays, for `functools.partial(function, name=array, ...)`.

All compute in float32, whatever the model computed in, and return losses_B. Every keyword is an array, and one that is
not wanted is left out: that is what `backprop.loss_and_grads` can hand to a compiled graph.

A weight over sigma multiplies a sample's loss; a mask weighs its tokens, and is divided out by its own mass, so that a
sample with a small subject counts as much as one without a mask.

B batch, L image tokens, C latent channels.
"""

from __future__ import annotations

import mlx.core as mx

MASSLESS = 1e-6  # the mass below which a sample's mask counts as empty


def mse(v_BLC: mx.array, target_BLC: mx.array, weight_B: mx.array | None = None, mask_BL: mx.array | None = None) -> mx.array:
    """The mean squared error."""
    return _mean(mx.square(_difference(v_BLC, target_BLC)), weight_B, mask_BL)


def pseudo_huber(
    v_BLC: mx.array,
    target_BLC: mx.array,
    c: mx.array,
    weight_B: mx.array | None = None,
    mask_BL: mx.array | None = None,
) -> mx.array:
    """2 c (sqrt(d^2 + c^2) - c) for each difference d: d^2 where it is far below c, 2 c |d| where it is far above.

    Scaled so that a learning rate means what it means for mse. Written without the difference of near numbers, which
    would lose small d; the root is of at least c^2, so that the gradient is finite at zero.
    """
    square = mx.square(_difference(v_BLC, target_BLC))
    return _mean(2 * c * square / (mx.sqrt(square + mx.square(c)) + c), weight_B, mask_BL)


def preservation(
    v_BLC: mx.array, base_BLC: mx.array, weight_B: mx.array | None = None, mask_BL: mx.array | None = None
) -> mx.array:
    """How far the adapted model strays from the bare base, base_BLC, where it should not: mean squared.

    With the class word in the trigger's place it is differential output preservation; with what a mask leaves out,
    `1 - mask_BL`, it holds the background. The base's prediction is a constant here.
    """
    return _mean(mx.square(_difference(v_BLC, base_BLC)), weight_B, mask_BL)


def _difference(v_BLC: mx.array, target_BLC: mx.array) -> mx.array:
    return v_BLC.astype(mx.float32) - target_BLC.astype(mx.float32)


def _mean(each_BLC: mx.array, weight_B: mx.array | None, mask_BL: mx.array | None) -> mx.array:
    """The mean over a sample, tokens weighed by the mask, times the sample's weight.

    A sum of shares: a sum that is divided would make kernels of its own, and a GPU compile each for seconds.
    """
    share = 1 / (each_BLC.shape[1] * each_BLC.shape[2])
    losses_B = mx.sum(share * each_BLC, axis=(1, 2)) if mask_BL is None else _masked_mean(each_BLC, mask_BL)
    return losses_B if weight_B is None else weight_B * losses_B


def _masked_mean(each_BLC: mx.array, mask_BL: mx.array) -> mx.array:
    """An empty mask gives zero, and a zero gradient, rather than a division by nothing."""
    each_BL = mx.mean(each_BLC, axis=2)
    return mx.sum(mask_BL * each_BL, axis=1) / mx.maximum(mx.sum(mask_BL, axis=1), MASSLESS)
