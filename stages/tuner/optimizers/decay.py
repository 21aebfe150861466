"""Decoupled weight decay: it acts on the array and never enters the moments. Loshchilov and Hutter 2019, arXiv 1711.05101."""

from __future__ import annotations

import mlx.core as mx


def decayed(value: mx.array, share: mx.array) -> mx.array:
    """A matrix or stack less `share` of it, lr times the weight decay; others unchanged."""
    # An adapter's matrix is an offset, which may decay towards the base model; a DoRA magnitude must not decay to zero.
    return (1 - share) * value if value.ndim > 1 else value
