"""AdamW: Adam with decoupled weight decay. Kingma and Ba 2015, arXiv 1412.6980; Loshchilov and Hutter 2019, arXiv 1711.05101."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from stages.tuner.optimizers.decay import decayed
from stages.tuner.optimizers.moments import bias_correction, mean_weights, next_step
from stages.tuner.optimizers.protocol import Arrays, Flag, Params


@dataclass(frozen=True)
class AdamW:
    """The optimizer to begin with: published LoRA recipes are stated for it. Its state is twice the trained arrays."""

    usual_lr: ClassVar[float] = 1e-4
    coupled: ClassVar[bool] = False

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def init(self, params: Params) -> Arrays:
        state = {"step": mx.zeros((), mx.int32)}
        for name, value in params.items():
            state |= self._store(f"{name}.m", mx.zeros_like(value)) | self._store(f"{name}.v", mx.zeros_like(value))
        return state

    def update(
        self, params: Params, grads: Params, state: Arrays, lr: float | mx.array, apply: Flag = True
    ) -> tuple[Arrays, Arrays]:
        step = state["step"] + 1
        rate, root = mx.where(apply, lr / bias_correction(self.beta1, step), 0.0), mx.sqrt(bias_correction(self.beta2, step))
        (old1, new1), (old2, new2) = mean_weights(self.beta1, apply), mean_weights(self.beta2, apply)
        decay = mx.where(apply, lr * self.weight_decay, 0.0)
        new_params: Arrays = {}
        new_state: Arrays = {"step": next_step(state["step"], apply)}
        for name, value in params.items():
            grad = grads[name]
            m = old1 * self._load(state, f"{name}.m", value) + new1 * grad
            v = old2 * self._load(state, f"{name}.v", value) + new2 * mx.square(grad)
            new_params[name] = decayed(value, decay) - rate * m / (mx.sqrt(v) / root + self.eps)
            new_state |= self._store(f"{name}.m", m) | self._store(f"{name}.v", v)
        return new_params, new_state

    def _store(self, key: str, moment: mx.array) -> Arrays:
        """What the state holds of a moment. A subclass may store several arrays, whose keys begin with `key`."""
        return {key: moment}

    def _load(self, state: Params, key: str, like: mx.array) -> mx.array:
        return state[key]
