"""AdamW: Adam with decoupled weight decay. Kingma and Ba 2015, arXiv 1412.6980; Loshchilov and Hutter 2019, arXiv 1711.05101."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from stages.tuner.optimizers.decay import shrink
from stages.tuner.optimizers.moments import Go, correction, count, weights

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
            state |= self._kept(f"{name}.m", mx.zeros_like(value)) | self._kept(f"{name}.v", mx.zeros_like(value))
        return state

    def update(
        self, params: Mapping[str, mx.array], grads: Mapping[str, mx.array], state: Arrays, lr: float | mx.array, go: Go = True
    ) -> tuple[Arrays, Arrays]:
        """One step down the gradient: the new arrays and the new state."""
        step = state["step"] + 1
        rate, root = mx.where(go, lr / correction(self.beta1, step), 0.0), mx.sqrt(correction(self.beta2, step))
        (old1, new1), (old2, new2) = weights(self.beta1, go), weights(self.beta2, go)
        shrinkage = mx.where(go, lr * self.weight_decay, 0.0)
        fresh: Arrays = {}
        after: Arrays = {"step": count(state["step"], go)}
        for name, value in params.items():
            grad = grads[name]
            m = old1 * self._read(state, f"{name}.m", value) + new1 * grad
            v = old2 * self._read(state, f"{name}.v", value) + new2 * mx.square(grad)
            fresh[name] = shrink(value, shrinkage) - rate * m / (mx.sqrt(v) / root + self.eps)
            after |= self._kept(f"{name}.m", m) | self._kept(f"{name}.v", v)
        return fresh, after

    def _kept(self, key: str, moment: mx.array) -> Arrays:
        """A moment as the state has it."""
        return {key: moment}

    def _read(self, state: Mapping[str, mx.array], key: str, like: mx.array) -> mx.array:
        """A moment in float32, in the shape of its array."""
        return state[key]
