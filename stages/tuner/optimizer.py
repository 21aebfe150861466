"""Optimizers as functions over flat dicts of float32 arrays; the state is explicit, flat and of arrays only.

An optimizer has `init(params) -> state` and `update(params, grads, state, lr) -> (params, state)`, both lazy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay: Loshchilov and Hutter 2019, arXiv 1711.05101."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def init(self, params: Mapping[str, mx.array]) -> Arrays:
        """Both moments of every array at zero, and how many updates there were."""
        state = {"step": mx.zeros((), mx.int32)}
        for name, value in params.items():
            state[f"{name}.m"] = mx.zeros_like(value)
            state[f"{name}.v"] = mx.zeros_like(value)
        return state

    def update(
        self, params: Mapping[str, mx.array], grads: Mapping[str, mx.array], state: Arrays, lr: float
    ) -> tuple[Arrays, Arrays]:
        """One step down the gradient: the new arrays and the new state."""
        step = state["step"] + 1
        rate, root = lr / _correction(self.beta1, step), mx.sqrt(_correction(self.beta2, step))
        fresh: Arrays = {}
        after: Arrays = {"step": step}
        for name, value in params.items():
            grad = grads[name]
            m = self.beta1 * state[f"{name}.m"] + (1 - self.beta1) * grad
            v = self.beta2 * state[f"{name}.v"] + (1 - self.beta2) * mx.square(grad)
            fresh[name] = (1 - lr * self.weight_decay) * value - rate * m / (mx.sqrt(v) / root + self.eps)
            after[f"{name}.m"], after[f"{name}.v"] = m, v
        return fresh, after


def _correction(beta: float, step: mx.array) -> mx.array:
    """1 - beta^step, to the last bits of float32 even where beta^step is near 1."""
    return -mx.expm1(step.astype(mx.float32) * math.log(beta))


def global_norm(grads: Mapping[str, mx.array]) -> mx.array:
    """The Euclidean norm of all arrays together, a float32 scalar; lazy, one reduction for all.

    Summed in the order of names: a dict that was read from a file has another order, and a sum other last bits.
    """
    squares = [mx.sum(mx.square(grads[name].astype(mx.float32))) for name in sorted(grads)]
    return mx.sqrt(mx.sum(mx.stack(squares)))


def clip(grads: Mapping[str, mx.array], norm: mx.array, limit: float) -> Arrays:
    """The gradients, shrunk together so that their norm is at most `limit`; as they are where the limit is 0."""
    if not limit:
        return dict(grads)
    factor = mx.minimum(1.0, limit / (norm + 1e-6))
    return {name: grad * factor for name, grad in grads.items()}
