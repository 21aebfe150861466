"""Decoupled weight decay: it acts on the array itself and never enters the moments.

Loshchilov and Hutter 2019, arXiv 1711.05101: a step takes the share lr * weight_decay of an array away.
"""

from __future__ import annotations

import mlx.core as mx


def decayed(value: mx.array, share: mx.array) -> mx.array:
    """Return (1 - share) * value if `value` is a matrix or a stack of matrices. Return a vector or a scalar unchanged. `share` is
    the part of the value that one step of weight decay removes. It is the learning rate times the weight decay.

    An adapter's matrix is an offset, which may decay towards the base model. A DoRA magnitude must not decay to zero.
    """
    return (1 - share) * value if value.ndim > 1 else value
