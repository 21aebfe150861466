"""Lion: every value moves by lr in the direction of a sign. Chen et al. 2023, arXiv 2302.06675."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from stages.tuner.optimizers.optimizer import Flag, Params, decayed, mean_weights
from stages.tuner.weights import Arrays


@dataclass(frozen=True)
class Lion:
    """Half of AdamW's state. For larger batches: noisy with one sample per step."""

    # 3 to 10 times below AdamW's; the weight decay should be larger by the same factor.
    usual_lr: ClassVar[float] = 2e-5
    coupled: ClassVar[bool] = False

    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    def init(self, params: Params) -> Arrays:
        return {f"{name}.m": mx.zeros_like(value) for name, value in params.items()}

    def update(
        self, params: Params, grads: Params, state: Arrays, lr: float | mx.array, apply: Flag = True
    ) -> tuple[Arrays, Arrays]:
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
