"""Adafactor: the second moment of a matrix from those of its rows and columns. Shazeer and Stern 2018, arXiv 1804.04235.

R rows, C columns; with more axes than two, every matrix of the last two is an array of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from stages.tuner.optimizers.decay import shrink
from stages.tuner.optimizers.moments import Go, count, weights

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class Adafactor:
    """Almost no state: for the largest models and ranks; a little less steady than AdamW, as it has no first moment.

    As trainers of LoRAs use it: with the schedule's lr, for every array alike. The paper's own form has
    `scale_parameter` (lr times an array's root mean square, `floor` at least; a B at zero then hardly starts) and
    `relative_step` (1 / sqrt(step), 0.01 at most, in place of lr). `beta1` adds a first moment, and its memory.
    """

    usual_lr: ClassVar[float] = 1e-4

    decay_rate: float = 0.8  # the second moment's decay at a step is 1 - step^-decay_rate
    eps: float = 1e-30  # added to squared gradients
    floor: float = 1e-3
    clip_threshold: float = 1.0  # largest root mean square of an array's update before lr
    beta1: float = 0.0
    scale_parameter: bool = False
    relative_step: bool = False
    weight_decay: float = 0.0

    def init(self, params: Mapping[str, mx.array]) -> Arrays:
        """All moments at zero, and how many updates there were."""
        state = {"step": mx.zeros((), mx.int32)}
        for name, value in params.items():
            if value.ndim < 2:
                state[f"{name}.v"] = mx.zeros_like(value)
            else:
                state[f"{name}.row"] = mx.zeros(value.shape[:-1], value.dtype)
                state[f"{name}.column"] = mx.zeros(value.shape[:-2] + value.shape[-1:], value.dtype)
            if self.beta1:
                state[f"{name}.m"] = mx.zeros_like(value)
        return state

    def update(
        self, params: Mapping[str, mx.array], grads: Mapping[str, mx.array], state: Arrays, lr: float | mx.array, go: Go = True
    ) -> tuple[Arrays, Arrays]:
        """One step down the gradient: the new arrays and the new state."""
        n = (state["step"] + 1).astype(mx.float32)
        base = mx.minimum(1e-2, mx.rsqrt(n)) if self.relative_step else lr
        both = weights(1 - n**-self.decay_rate, go)
        fresh: Arrays = {}
        after: Arrays = {"step": count(state["step"], go)}
        for name, value in params.items():
            rate = base * mx.maximum(self.floor, _rms(value)) if self.scale_parameter else base
            change, moments = self._scaled(name, grads[name], state, *both)
            change = rate * change / mx.maximum(1.0, _rms(change) / self.clip_threshold)
            after |= moments
            if self.beta1:
                old, new = weights(self.beta1, go)
                after[f"{name}.m"] = change = old * state[f"{name}.m"] + new * change
            fresh[name] = shrink(value, mx.where(go, rate * self.weight_decay, 0.0)) - mx.where(go, change, 0.0)
        return fresh, after

    def _scaled(self, name: str, grad: mx.array, state: Arrays, old: mx.array, new: mx.array) -> tuple[mx.array, Arrays]:
        """The gradient over the root of its second moment, and the moments."""
        square = mx.square(grad) + self.eps
        if grad.ndim < 2:
            v = old * state[f"{name}.v"] + new * square
            return grad * mx.rsqrt(v), {f"{name}.v": v}
        row_R = old * state[f"{name}.row"] + new * mx.mean(square, axis=-1)
        column_C = old * state[f"{name}.column"] + new * mx.mean(square, axis=-2)
        share_R = row_R / mx.mean(row_R, axis=-1, keepdims=True)
        scaled_RC = grad * mx.rsqrt(share_R)[..., None] * mx.rsqrt(column_C)[..., None, :]
        return scaled_RC, {f"{name}.row": row_R, f"{name}.column": column_C}


def _rms(x: mx.array) -> mx.array:
    """The root mean square of each array, to be multiplied with it."""
    axes = tuple(range(x.ndim))[-2:]
    return mx.sqrt(mx.mean(mx.square(x), axis=axes, keepdims=True))
