"""Running means of gradients: their weights, and the bias correction for their start at zero."""

from __future__ import annotations

import math

import mlx.core as mx

from stages.tuner.optimizers.protocol import Flag


def mean_weights(beta: float | mx.array, apply: Flag) -> tuple[mx.array, mx.array]:
    """(old, new) for mean = old * mean + new * value: (beta, 1 - beta), or (1, 0) without `apply`."""
    # Factors cost nothing in the loop over the values; a choice between two results would keep both in memory.
    return mx.where(apply, beta, 1.0), mx.where(apply, 1 - beta, 0.0)


def bias_correction(beta: float, step: mx.array) -> mx.array:
    if beta == 0:
        return mx.ones((), mx.float32)
    # 1 - beta^step, exact to its last bits even if beta^step is near 1.
    return -mx.expm1(step.astype(mx.float32) * math.log(beta))


def next_step(step: mx.array, apply: Flag) -> mx.array:
    return step + apply
