"""Adafactor: the second moment of a matrix from those of its rows and columns. Shazeer and Stern 2018, arXiv 1804.04235.

In names of arrays: R rows, C columns. An array with more axes than two is a stack of matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from stages.tuner.optimizers.decay import decayed
from stages.tuner.optimizers.moments import mean_weights, next_step
from stages.tuner.optimizers.protocol import Arrays, Flag, Params


@dataclass(frozen=True)
class Adafactor:
    """The Adafactor optimizer, which needs almost no memory for its state. For a matrix, it stores one mean of squared
    gradients per row and one per column. `init(params)` returns the state, and `update(...)` takes a step.
    `clip_threshold` limits the root mean square of an update. `beta1` is the decay rate of the average of updates
    (momentum), or 0 for none. `weight_decay` shrinks matrices only.

    Each gradient is divided by the root of an estimated second moment. An update is scaled down if its root mean square
    is above `clip_threshold`. Then it is multiplied by the learning rate. Each step also multiplies every matrix by
    `1 - weight_decay * lr`, where `lr` is the learning rate. Adafactor suits the largest models and ranks.

    It is a little less steady than AdamW, because it has no first moment unless `beta1` is set. As LoRA trainers use it, it takes
    the schedule's learning rate for every array. The paper's own form has `scale_parameter` and `relative_step`.
    `scale_parameter` multiplies the rate by an array's root mean square, at least `floor`. An array B at zero then hardly starts.
    `relative_step` uses 1 / sqrt(step), at most 0.01, as the learning rate.
    """

    usual_lr: ClassVar[float] = 1e-4
    coupled: ClassVar[bool] = False

    decay_rate: float = 0.8  # the second moment's decay at a step is 1 - step^-decay_rate
    eps: float = 1e-30  # added to squared gradients
    floor: float = 1e-3
    clip_threshold: float = 1.0  # largest root mean square of an array's update before lr
    beta1: float = 0.0
    scale_parameter: bool = False
    relative_step: bool = False
    weight_decay: float = 0.0

    def init(self, params: Params) -> Arrays:
        """Return the optimizer's state before the first step, as a dict from key to array of zeros. `params` maps names to
        arrays. A matrix has the keys "<name>.row" and "<name>.column". A vector or scalar has the key "<name>.v". If `beta1` is
        not 0, every array also has the key "<name>.m". The key "step" has the number of updates, int32.

        "row", "column" and "v" are second moments, that is, means of squared gradients. "m" is the first moment, a mean of
        updates.
        """
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
        """Take one step and return (new arrays, new state). `params` maps names to arrays. `grads` maps the same names to
        gradients. `state` is the result of `init` or of the step before. `lr` is the learning rate. If `apply` is false, arrays
        and state are returned unchanged.
        """
        n = (state["step"] + 1).astype(mx.float32)
        base = mx.minimum(1e-2, mx.rsqrt(n)) if self.relative_step else lr
        both = mean_weights(1 - n**-self.decay_rate, apply)
        new_params: Arrays = {}
        new_state: Arrays = {"step": next_step(state["step"], apply)}
        for name, value in params.items():
            rate = base * mx.maximum(self.floor, _rms(value)) if self.scale_parameter else base
            change, moments = self._normalized(name, grads[name], state, *both)
            change = rate * change / mx.maximum(1.0, _rms(change) / self.clip_threshold)
            new_state |= moments
            if self.beta1:
                old, new = mean_weights(self.beta1, apply)
                change = old * state[f"{name}.m"] + new * change
                # Zero gradients at the first step have no normalised value: 0 / 0.
                new_state[f"{name}.m"] = mx.where(apply, change, state[f"{name}.m"])
            decay = mx.where(apply, rate * self.weight_decay, 0.0)
            new_params[name] = decayed(value, decay) - mx.where(apply, change, 0.0)
        return new_params, new_state

    def _normalized(self, name: str, grad: mx.array, state: Arrays, old: mx.array, new: mx.array) -> tuple[mx.array, Arrays]:
        """Return `(normalised gradient, new means)` for the array `name`. `grad` is the gradient of the array. Each
        value of the gradient is divided by the root of a running mean of squared gradients. `state` is the optimizer's
        state before the step, which holds the old means. `old` and `new` are the two factors that update a running
        mean: the new mean is `old` times the old mean, plus `new` times the squared gradient.

        A matrix has one mean per row and one per column. The mean for a single value is estimated from the means of its
        row and its column. The new means are a dict with the keys "<name>.row" and "<name>.column". For a vector or
        scalar, there is one mean per value, with the key "<name>.v".
        """
        square = mx.square(grad) + self.eps
        if grad.ndim < 2:
            v = old * state[f"{name}.v"] + new * square
            return grad * mx.rsqrt(v), {f"{name}.v": v}
        row_R = old * state[f"{name}.row"] + new * mx.mean(square, axis=-1)
        column_C = old * state[f"{name}.column"] + new * mx.mean(square, axis=-2)
        share_R = row_R / mx.mean(row_R, axis=-1, keepdims=True)
        normalized_RC = grad * mx.rsqrt(share_R)[..., None] * mx.rsqrt(column_C)[..., None, :]
        return normalized_RC, {f"{name}.row": row_R, f"{name}.column": column_C}


def _rms(x: mx.array) -> mx.array:
    """Return the root mean square of `x` over its last two axes, which remain as axes of length 1."""
    axes = tuple(range(x.ndim))[-2:]
    return mx.sqrt(mx.mean(mx.square(x), axis=axes, keepdims=True))
