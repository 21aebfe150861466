"""Adafactor: Shazeer and Stern 2018, arXiv 1804.04235. R rows, C columns; more than two axes are a stack of matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from stages.tuner.optimizers.optimizer import Flag, Params, decayed, mean_weights
from stages.tuner.weights import Arrays

DECAY_RATE = 0.8  # the second moment's decay at a step is 1 - step^-DECAY_RATE


@dataclass(frozen=True)
class Adafactor:
    """A matrix's second moment from its rows and columns: almost no state. A little less steady than AdamW unless beta1 > 0."""

    usual_lr: ClassVar[float] = 1e-4
    coupled: ClassVar[bool] = False

    # As LoRA trainers use it, with the schedule's learning rate for every array. The paper's rate is relative to an array's root
    # mean square, with which an array B at zero hardly starts.
    eps: float = 1e-30  # added to squared gradients
    beta1: float = 0.0  # decay of a mean of updates (momentum); 0: none
    weight_decay: float = 0.0

    def init(self, params: Params) -> Arrays:
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
        self, params: Params, grads: Params, state: Arrays, lr: float | mx.array, apply: Flag = True
    ) -> tuple[Arrays, Arrays]:
        n = (state["step"] + 1).astype(mx.float32)
        both = mean_weights(1 - n**-DECAY_RATE, apply)
        new_params: Arrays = {}
        new_state: Arrays = {"step": state["step"] + apply}
        for name, value in params.items():
            change, moments = self._normalized(name, grads[name], state, *both)
            # An update whose root mean square is above 1 is scaled down to it.
            rms = mx.sqrt(mx.mean(mx.square(change), axis=tuple(range(change.ndim))[-2:], keepdims=True))
            change = lr * change / mx.maximum(1.0, rms)
            new_state |= moments
            if self.beta1:
                old, new = mean_weights(self.beta1, apply)
                change = old * state[f"{name}.m"] + new * change
                # Zero gradients at the first step have no normalised value: 0 / 0.
                new_state[f"{name}.m"] = mx.where(apply, change, state[f"{name}.m"])
            decay = mx.where(apply, lr * self.weight_decay, 0.0)
            new_params[name] = decayed(value, decay) - mx.where(apply, change, 0.0)
        return new_params, new_state

    def _normalized(self, name: str, grad: mx.array, state: Arrays, old: mx.array, new: mx.array) -> tuple[mx.array, Arrays]:
        square = mx.square(grad) + self.eps
        if grad.ndim < 2:
            v = old * state[f"{name}.v"] + new * square
            return grad * mx.rsqrt(v), {f"{name}.v": v}
        row_R = old * state[f"{name}.row"] + new * mx.mean(square, axis=-1)
        column_C = old * state[f"{name}.column"] + new * mx.mean(square, axis=-2)
        share_R = row_R / mx.mean(row_R, axis=-1, keepdims=True)
        normalized_RC = grad * mx.rsqrt(share_R)[..., None] * mx.rsqrt(column_C)[..., None, :]
        return normalized_RC, {f"{name}.row": row_R, f"{name}.column": column_C}
