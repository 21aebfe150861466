"""Lion: every value moves by lr, in the direction of the sign. Chen et al. 2023, arXiv 2302.06675."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from stages.tuner.optimizers.decay import shrink
from stages.tuner.optimizers.moments import Go, weights

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class Lion:
    """Half of AdamW's state, at larger batches; noisy with one sample a step.

    A step is larger than AdamW's: the paper wants lr 3 to 10 times smaller and weight_decay as much larger.
    """

    usual_lr: ClassVar[float] = 2e-5

    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    def init(self, params: Mapping[str, mx.array]) -> Arrays:
        """The moment of every array at zero."""
        return {f"{name}.m": mx.zeros_like(value) for name, value in params.items()}

    def update(
        self, params: Mapping[str, mx.array], grads: Mapping[str, mx.array], state: Arrays, lr: float | mx.array, go: Go = True
    ) -> tuple[Arrays, Arrays]:
        """One step down the gradient: the new arrays and the new state."""
        rate, shrinkage = mx.where(go, lr, 0.0), mx.where(go, lr * self.weight_decay, 0.0)
        old, new = weights(self.beta2, go)
        fresh: Arrays = {}
        after: Arrays = {}
        for name, value in params.items():
            grad, m = grads[name], state[f"{name}.m"]
            direction = mx.sign(self.beta1 * m + (1 - self.beta1) * grad)
            fresh[name] = shrink(value, shrinkage) - rate * direction
            after[f"{name}.m"] = old * m + new * grad
        return fresh, after
