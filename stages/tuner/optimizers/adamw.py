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
    """The AdamW optimizer: Adam with decoupled weight decay. `beta1` is the decay rate of the running mean of the
    gradient. `beta2` is the decay rate of the running mean of the squared gradient. `eps` is added to the denominator
    of the update. A step also removes the share `lr * weight_decay` of every matrix. The state takes twice the memory
    of the trained arrays.

    Let `m` and `v` be the two running means, corrected for their start at zero. A step then changes a matrix `p` to
    `(1 - lr * weight_decay) * p - lr * m / (sqrt(v) + eps)`. Vectors and scalars have no weight decay.

    It is the optimizer to begin with: published LoRA recipes are stated for it.
    """

    usual_lr: ClassVar[float] = 1e-4
    coupled: ClassVar[bool] = False

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def init(self, params: Params) -> Arrays:
        """Return the state before the first step, all zeros. `params` maps names to arrays. The keys "<name>.m" and "<name>.v"
        have the two moments of each array. The key "step" has the number of updates.
        """
        state = {"step": mx.zeros((), mx.int32)}
        for name, value in params.items():
            state |= self._store(f"{name}.m", mx.zeros_like(value)) | self._store(f"{name}.v", mx.zeros_like(value))
        return state

    def update(
        self, params: Params, grads: Params, state: Arrays, lr: float | mx.array, apply: Flag = True
    ) -> tuple[Arrays, Arrays]:
        """Take one step and return (new arrays, new state). `params` maps names to arrays. `grads` maps the same names to
        gradients. `state` is the result of `init` or of the step before. `lr` is the learning rate. If `apply` is false, arrays
        and state are returned unchanged.
        """
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
        """Return a dict with the array `moment`, as it is stored in the optimizer's state. A moment is a running mean
        of gradients or of squared gradients. `key` is the name of the moment, such as "<name>.m" for the trained array
        called <name>. `AdamW` stores the moment unchanged, so the dict is `{key: moment}`.

        A subclass may store several arrays, whose keys then begin with `key`. For example, `AdamW8bit` stores 8-bit codes under
        `key` and their scales under "<key>.scale".
        """
        return {key: moment}

    def _load(self, state: Params, key: str, like: mx.array) -> mx.array:
        """Return the moment that `state` stores under `key`, as a float32 array. A moment is a running mean of
        gradients or of squared gradients. `like` is an array of the same shape as the moment.
        """
        return state[key]
