"""AdamW: Adam with decoupled weight decay. Kingma and Ba 2015, arXiv 1412.6980; Loshchilov and Hutter 2019, arXiv 1711.05101."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from stages.tuner import decay

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class AdamW:
    """The one to begin with: every published LoRA recipe is stated for it. State: twice the adapter's size."""

    usual_lr: ClassVar[float] = 1e-4

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
        self, params: Mapping[str, mx.array], grads: Mapping[str, mx.array], state: Arrays, lr: float | mx.array
    ) -> tuple[Arrays, Arrays]:
        """One step down the gradient: the new arrays and the new state."""
        step = state["step"] + 1
        rate, root = lr / correction(self.beta1, step), mx.sqrt(correction(self.beta2, step))
        fresh: Arrays = {}
        after: Arrays = {"step": step}
        for name, value in params.items():
            grad = grads[name]
            m = self.beta1 * state[f"{name}.m"] + (1 - self.beta1) * grad
            v = self.beta2 * state[f"{name}.v"] + (1 - self.beta2) * mx.square(grad)
            kept = decay.shrink(value, lr, self.weight_decay)
            fresh[name] = kept - rate * m / (mx.sqrt(v) / root + self.eps)
            after[f"{name}.m"], after[f"{name}.v"] = m, v
        return fresh, after


def correction(beta: float, step: mx.array) -> mx.array:
    """1 - beta^step, to the last bits of float32 even where beta^step is near 1."""
    if beta == 0:
        return mx.ones((), mx.float32)
    return -mx.expm1(step.astype(mx.float32) * math.log(beta))
