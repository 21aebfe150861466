"""Which arrays shrink under weight decay. The decay is decoupled: it acts on the array, and never enters the moments.

Loshchilov and Hutter 2019, arXiv 1711.05101: each step takes lr * weight_decay of an array away.
"""

from __future__ import annotations

import mlx.core as mx


def shrink(value: mx.array, share: mx.array) -> mx.array:
    """A matrix without this share of it; a vector or a number as it is.

    A matrix of an adapter is an offset, which decays towards the base model; a magnitude (DoRA's) or a bias has no
    business at zero.
    """
    return (1 - share) * value if value.ndim > 1 else value
