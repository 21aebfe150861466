"""What an optimizer is, `init(params) -> state` and `update(params, grads, state, lr, apply) -> (params, state)`, and what
the methods share. Beside this file, one file per method; a new one needs its file, its name in MethodName and METHODS of
`__init__.py`, in `OptimizerConfig` (stages/tuner/config.py) fields for numbers of its own and a word in the help of `kind`, and a
section in data/research/pages/rivals.toml; then `make pages`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Protocol

import mlx.core as mx

from stages.tuner.weights import Arrays

Params = Mapping[str, mx.array]  # arrays by name
Flag = bool | mx.array  # True or 1 to take a step, False or 0 to leave everything as it is; an array keeps the step lazy


class Optimizer(Protocol):
    """Holds settings only. The state is a flat dict of arrays, stored in a checkpoint as it is. Lazy: reads no value.

    Arrays are stacks (N, rows, columns) of equal shapes; the keys of a state are "<name of the stack>.<suffix>".
    """

    @property
    def coupled(self) -> bool:
        """Whether one array's update depends on the gradients of others: all must then be updated in one call."""

    def init(self, params: Params) -> Arrays:
        """The state before the first step."""

    def update(
        self, params: Params, grads: Params, state: Arrays, lr: float | mx.array, apply: Flag = True
    ) -> tuple[Arrays, Arrays]:
        """New arrays and state, or the old ones without `apply`. All gradients are finite."""


class Method(Optimizer, Protocol):
    usual_lr: ClassVar[float]  # a good first learning rate


# Running means of gradients: their weights, and the bias correction for their start at zero


def mean_weights(beta: float | mx.array, apply: Flag) -> tuple[mx.array, mx.array]:
    """(old, new) for mean = old * mean + new * value: (beta, 1 - beta), or (1, 0) without `apply`."""
    # Factors cost nothing in the loop over the values; a choice between two results would keep both in memory.
    return mx.where(apply, beta, 1.0), mx.where(apply, 1 - beta, 0.0)


def bias_correction(beta: float, step: mx.array) -> mx.array:
    if beta == 0:
        return mx.ones((), mx.float32)
    # 1 - beta^step, exact to its last bits even if beta^step is near 1.
    return -mx.expm1(step.astype(mx.float32) * math.log(beta))


def decayed(value: mx.array, share: mx.array) -> mx.array:
    """A matrix or stack less `share` of it, lr times the weight decay; others unchanged. Loshchilov and Hutter 2019."""
    # An adapter's matrix is an offset, which may decay towards the base model; a DoRA magnitude must not decay to zero.
    return (1 - share) * value if value.ndim > 1 else value
