"""Lion: every value moves by lr in the direction of a sign. Chen et al. 2023, arXiv 2302.06675."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from stages.tuner.optimizers.decay import decayed
from stages.tuner.optimizers.moments import mean_weights
from stages.tuner.optimizers.protocol import Arrays, Flag, Params


@dataclass(frozen=True)
class Lion:
    """The Lion optimizer, which moves every value by the learning rate in each step. The direction is `-sign(beta1 * m
    + (1 - beta1) * g)`. Here `g` is the gradient and `m` is the running mean of earlier gradients. `beta2` is the decay
    rate of `m` per step. A step also shrinks every matrix by the share `lr * weight_decay`. The state takes half as
    much memory as that of AdamW.

    Lion suits larger batches. With one sample per step it is noisy. Use a learning rate 3 to 10 times smaller than for
    AdamW. Make the weight decay larger by the same factor.

    Let `g` be the gradient and `m` its running mean. A step changes a matrix `p` to
    `(1 - lr * weight_decay) * p - lr * sign(beta1 * m + (1 - beta1) * g)`. Then `m` becomes
    `beta2 * m + (1 - beta2) * g`. Vectors and scalars have no weight decay.
    """

    usual_lr: ClassVar[float] = 2e-5
    coupled: ClassVar[bool] = False

    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    def init(self, params: Params) -> Arrays:
        """Return the state before the first step, all zeros. `params` maps names to arrays. The key "<name>.m" has the moment of
        each array.
        """
        return {f"{name}.m": mx.zeros_like(value) for name, value in params.items()}

    def update(
        self, params: Params, grads: Params, state: Arrays, lr: float | mx.array, apply: Flag = True
    ) -> tuple[Arrays, Arrays]:
        """Take one step and return (new arrays, new state). `params` maps names to arrays. `grads` maps the same names to
        gradients. `state` is the result of `init` or of the step before. `lr` is the learning rate. If `apply` is false, arrays
        and state are returned unchanged.
        """
        rate, decay = mx.where(apply, lr, 0.0), mx.where(apply, lr * self.weight_decay, 0.0)
        old, new = mean_weights(self.beta2, apply)
        new_params: Arrays = {}
        new_state: Arrays = {}
        for name, value in params.items():
            grad, m = grads[name], state[f"{name}.m"]
            direction = mx.sign(self.beta1 * m + (1 - self.beta1) * grad)
            new_params[name] = decayed(value, decay) - rate * direction
            new_state[f"{name}.m"] = old * m + new * grad
        return new_params, new_state
