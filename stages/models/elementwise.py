"""Exponential functions in the form that is fast on the device."""

from __future__ import annotations

import math
import sys

import mlx.core as mx


def slow_exp(x: mx.array) -> bool:
    """Whether `mx.exp` is slower than a power of e: float32 on a CPU under Linux."""
    # MLX 0.32 computes exp there with calls of fma: 10 ns an element, and 16 ns for sigmoid. Its power calls the C library's
    # powf, which takes 4 ns.
    return sys.platform.startswith("linux") and x.dtype == mx.float32 and mx.default_device() == mx.cpu


def exp(x: mx.array) -> mx.array:
    # The rounding of e to float32 adds a relative error of 3e-8 |x|.
    y: mx.array = mx.power(mx.array(math.e, mx.float32), x) if slow_exp(x) else mx.exp(x)
    return y


def sigmoid(x: mx.array) -> mx.array:
    y: mx.array = mx.reciprocal(1 + mx.power(mx.array(1 / math.e, mx.float32), x)) if slow_exp(x) else mx.sigmoid(x)
    return y


def silu(x: mx.array) -> mx.array:
    return x * sigmoid(x)


def softmax(x: mx.array) -> mx.array:
    """Over the last axis, with sums in float32."""
    if not slow_exp(x):
        found: mx.array = mx.softmax(x, axis=-1, precise=True)
        return found
    y = exp(x - mx.max(x, axis=-1, keepdims=True))
    return y * mx.reciprocal(mx.sum(y, axis=-1, keepdims=True))
