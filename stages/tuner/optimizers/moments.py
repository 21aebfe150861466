"""Running means of gradients: how much of the old stays, and how far the start at zero is to be corrected."""

from __future__ import annotations

import math

import mlx.core as mx

Go = bool | mx.array  # whether a step is taken, 0 or 1; an array of one value, so that nobody has to look


def weights(beta: float | mx.array, go: Go) -> tuple[mx.array, mx.array]:
    """(of the old mean, of the new value): beta and 1 - beta, or 1 and 0 where no step is taken.

    As factors they cost nothing in a loop over the values, where a choice between two results keeps both in memory.
    """
    return mx.where(go, beta, 1.0), mx.where(go, 1 - beta, 0.0)


def correction(beta: float, step: mx.array) -> mx.array:
    """1 - beta^step, to the last bits of float32 even where beta^step is near 1."""
    if beta == 0:
        return mx.ones((), mx.float32)
    return -mx.expm1(step.astype(mx.float32) * math.log(beta))


def count(step: mx.array, go: Go) -> mx.array:
    """The number of steps after this one."""
    return step + go
