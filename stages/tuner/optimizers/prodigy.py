"""Prodigy: Mishchenko and Defazio 2023, arXiv 2306.06101, as in its authors' code with bias correction and safeguard_warmup."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from stages.tuner.optimizers.optimizer import Flag, Params, bias_correction, decayed, mean_weights
from stages.tuner.weights import Arrays

D0 = 1e-6  # the first estimate of d


@dataclass(frozen=True)
class Prodigy:
    """AdamW with the learning rate lr d, if no good one is known: keep lr at 1. Its state is four times the trained arrays."""

    usual_lr: ClassVar[float] = 1.0
    coupled: ClassVar[bool] = True  # d is estimated over all arrays

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    d_coef: float = 1.0  # 0.5 is slower, 2 is faster
    weight_decay: float = 0.0

    def init(self, params: Params) -> Arrays:
        state = {"step": mx.zeros((), mx.int32), "numerator": mx.zeros((), mx.float32)}
        # The estimate and the largest so far; "numerator" and "<name>.s" are the sums that give it.
        state["d"] = state["d_max"] = mx.array(D0, mx.float32)
        for name, value in params.items():
            state[f"{name}.start"] = value
            state |= {f"{name}.{moment}": mx.zeros_like(value) for moment in "mvs"}
        return state

    def update(
        self, params: Params, grads: Params, state: Arrays, lr: float | mx.array, apply: Flag = True
    ) -> tuple[Arrays, Arrays]:
        step, d = state["step"] + 1, state["d"]
        rate = d * lr * mx.sqrt(bias_correction(self.beta2, step)) / bias_correction(self.beta1, step)
        rate = mx.where(apply, rate, 0.0)
        new_state = {"step": state["step"] + apply} | self._estimate(params, grads, state, rate, apply)
        (old1, new1), (old2, new2) = mean_weights(self.beta1, apply), mean_weights(self.beta2, apply)
        new_params: Arrays = {}
        for name, value in params.items():
            grad = d * grads[name]
            m = old1 * state[f"{name}.m"] + new1 * grad
            v = old2 * state[f"{name}.v"] + new2 * mx.square(grad)
            new_params[name] = decayed(value, rate * self.weight_decay) - rate * m / (mx.sqrt(v) + new_state["d"] * self.eps)
            new_state |= {f"{name}.m": m, f"{name}.v": v, f"{name}.start": state[f"{name}.start"]}
        return new_params, new_state

    def _estimate(self, params: Params, grads: Params, state: Arrays, rate: mx.array, apply: Flag) -> Arrays:
        """The new "d", "d_max" and sums. `rate` has the old d in it, and is 0 without `apply`."""
        # One number for all arrays: a lower bound of the distance from their start to a solution. It only grows: gradients
        # that keep pointing away from the start show that it is too small.
        d = state["d"]
        decay = mx.where(apply, math.sqrt(self.beta2), 1.0)
        # Without lr, as in trainers of diffusion models and not in the authors' code: a warm-up of lr would inflate d.
        gain = d / D0 * mx.where(apply, d, 0.0)
        entries: Arrays = {}
        away, sizes = [], []
        for name in sorted(params):  # a dict from a file has another order, and a sum in that order other last bits
            away.append(mx.sum(grads[name] * (state[f"{name}.start"] - params[name])))
            entries[f"{name}.s"] = decay * state[f"{name}.s"] + gain * grads[name]
            sizes.append(mx.sum(mx.abs(entries[f"{name}.s"])))
        numerator = decay * state["numerator"] + d / D0 * rate * mx.sum(mx.stack(away))
        size = mx.sum(mx.stack(sizes))
        estimate = mx.where(size > 0, self.d_coef * numerator / mx.where(size > 0, size, 1.0), d)
        longest = mx.maximum(state["d_max"], mx.where(apply, estimate, 0.0))
        return entries | {"numerator": numerator, "d_max": longest, "d": mx.where(apply, longest, d)}
