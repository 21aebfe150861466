"""Prodigy: AdamW that estimates its own learning rate. Mishchenko and Defazio 2023, arXiv 2306.06101, as in its authors' code.

The estimate d is one number for all arrays: a lower bound of the distance from their start to a solution. It only grows:
gradients that keep pointing away from the start show that d is too small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from stages.tuner.optimizers.decay import decayed
from stages.tuner.optimizers.moments import bias_correction, mean_weights, next_step
from stages.tuner.optimizers.protocol import Arrays, Flag, Params


@dataclass(frozen=True)
class Prodigy:
    """The Prodigy optimizer: AdamW with the learning rate `lr * d`. The factor `d` is estimated during training. It starts at
    `d0` and never falls. Use Prodigy if no good learning rate is known. Keep `lr` at 1, and steer with `d_coef` (0.5 is slower,
    2 is faster). After the first growth of `d`, `growth_rate` is the largest factor by which `d` grows in one step. The state
    takes four times the memory of the trained arrays.

    A `growth_rate` of 1.02 acts as a warm-up. `safeguard_warmup` keeps a warm-up from inflating d, and `bias_correction` is
    Adam's. Both are on, as in trainers of diffusion models; in the authors' code they are off.
    """

    usual_lr: ClassVar[float] = 1.0
    coupled: ClassVar[bool] = True  # d is estimated over all arrays

    beta1: float = 0.9
    beta2: float = 0.999
    beta3: float | None = None  # decay of the sums that d is estimated from; None: sqrt(beta2)
    eps: float = 1e-8
    d0: float = 1e-6
    d_coef: float = 1.0
    growth_rate: float = math.inf
    safeguard_warmup: bool = True
    bias_correction: bool = True
    weight_decay: float = 0.0

    def init(self, params: Params) -> Arrays:
        """Return the state before the first step, as a dict from key to array. `params` maps the names of the trained arrays to
        their start values. Each array has the keys "<name>.start", "<name>.m", "<name>.v" and "<name>.s". The other keys are
        "d", "d_max", "numerator" and "step".

        "start" is the start value. "m" and "v" are the moments. "s" and "numerator" are running sums. "d" and "d_max" are the
        estimate of the learning rate, at first `d0`. "step" is the number of updates. Moments, sums and "step" are 0.
        """
        state = {"step": mx.zeros((), mx.int32), "numerator": mx.zeros((), mx.float32)}
        state["d"] = state["d_max"] = mx.array(self.d0, mx.float32)
        for name, value in params.items():
            state[f"{name}.start"] = value
            state |= {f"{name}.{moment}": mx.zeros_like(value) for moment in "mvs"}
        return state

    def update(
        self, params: Params, grads: Params, state: Arrays, lr: float | mx.array, apply: Flag = True
    ) -> tuple[Arrays, Arrays]:
        """Take one step and return (new arrays, new state). `params` maps names to arrays. `grads` maps the same names to
        gradients. `state` is the result of `init` or of the step before. `lr` multiplies the estimated learning rate and is
        normally 1. If `apply` is false, arrays and state are returned unchanged.
        """
        step, d = state["step"] + 1, state["d"]
        rate = d * lr
        if self.bias_correction:
            rate = rate * mx.sqrt(bias_correction(self.beta2, step)) / bias_correction(self.beta1, step)
        rate = mx.where(apply, rate, 0.0)
        new_state = {"step": next_step(state["step"], apply)} | self._estimate(params, grads, state, rate, apply)
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
        """Estimate the factor `d` anew, and return the changed entries of the optimizer's state as a dict. Prodigy
        multiplies the user's learning rate by `d`. The entries are "d", "d_max", "numerator", and "<name>.s" for each
        trained array. `params` and `grads` map names to the trained arrays and their gradients. `state` is the state
        before this step. `rate` is the learning rate of this step, already multiplied by the old `d`. `apply` is false
        to skip the step; the entries then keep their values.

        "d_max" is the largest estimate so far. "numerator" and "<name>.s" are the running sums from which `d` is
        estimated. `rate` must be 0 if `apply` is false.
        """
        d = state["d"]
        decay = mx.where(apply, math.sqrt(self.beta2) if self.beta3 is None else self.beta3, 1.0)
        gain = d / self.d0 * (mx.where(apply, d, 0.0) if self.safeguard_warmup else rate)
        entries: Arrays = {}
        away, sizes = [], []
        for name in sorted(params):  # a dict from a file has another order, and a sum in that order other last bits
            away.append(mx.sum(grads[name] * (state[f"{name}.start"] - params[name])))
            entries[f"{name}.s"] = decay * state[f"{name}.s"] + gain * grads[name]
            sizes.append(mx.sum(mx.abs(entries[f"{name}.s"])))
        numerator = decay * state["numerator"] + d / self.d0 * rate * mx.sum(mx.stack(away))
        size = mx.sum(mx.stack(sizes))
        estimate = mx.where(size > 0, self.d_coef * numerator / mx.where(size > 0, size, 1.0), d)
        longest = mx.maximum(state["d_max"], mx.where(apply, estimate, 0.0))
        entries |= {"numerator": numerator, "d_max": longest, "d": mx.where(apply, longest, d)}
        if math.isfinite(self.growth_rate):  # the first estimate above d0 is taken, however large
            bound = mx.where(d == self.d0, mx.maximum(d, estimate), d) * self.growth_rate
            entries["d"] = mx.where(apply, mx.minimum(longest, bound), d)
        return entries
