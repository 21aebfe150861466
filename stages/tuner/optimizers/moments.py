"""Running means of gradients: their weights, and the bias correction for their start at zero."""

from __future__ import annotations

import math

import mlx.core as mx

from stages.tuner.optimizers.protocol import Flag


def mean_weights(beta: float | mx.array, apply: Flag) -> tuple[mx.array, mx.array]:
    """Return the weights `(old, new)` for one update of a running mean. The caller computes the new mean as
    `old * mean + new * value`. `beta` is the decay rate. The weights are `(beta, 1 - beta)`. If `apply` is false, they
    are `(1, 0)`, and the mean stays unchanged.

    As factors they cost nothing in the loop over the values. A choice between two results would keep both in memory.
    """
    return mx.where(apply, beta, 1.0), mx.where(apply, 1 - beta, 0.0)


def bias_correction(beta: float, step: mx.array) -> mx.array:
    """Return 1 - beta^step, a float32 scalar. If a running mean with decay rate `beta` started at 0, divide it by this number.
    `step` is the number of updates, from 1.

    The result is exact to its last bits even if beta^step is near 1.
    """
    if beta == 0:
        return mx.ones((), mx.float32)
    return -mx.expm1(step.astype(mx.float32) * math.log(beta))


def next_step(step: mx.array, apply: Flag) -> mx.array:
    """Return the number of updates after this one: `step` + 1, or `step` if `apply` is false."""
    return step + apply
