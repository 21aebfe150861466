"""Prodigy: AdamW that finds its own rate. Mishchenko and Defazio 2023, arXiv 2306.06101, in the form of its authors' code.

d is the estimate of how far the arrays have to go, one number over all of them; it only grows. A gradient that keeps
pointing away from the start says that d is too small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from stages.tuner.optimizers.decay import shrink
from stages.tuner.optimizers.moments import Go, correction, count, weights

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class Prodigy:
    """For a first run on new data, when no learning rate is known: lr is then a factor, and stays at 1. State: four times
    the adapter's size.

    Steer it by `d_coef` (0.5 slower, 2 faster), not by lr. `safeguard_warmup` keeps a warm-up from inflating d, and
    `bias_correction` is Adam's; both are on, as trainers of diffusion models have them, where the authors' are off.
    `growth_rate` bounds the factor by which d grows in a step: 1.02 is a warm-up of its own.
    """

    usual_lr: ClassVar[float] = 1.0

    beta1: float = 0.9
    beta2: float = 0.999
    beta3: float | None = None  # decay of what d is estimated from; sqrt(beta2) where None
    eps: float = 1e-8
    d0: float = 1e-6
    d_coef: float = 1.0
    growth_rate: float = math.inf
    safeguard_warmup: bool = True
    bias_correction: bool = True
    weight_decay: float = 0.0

    def init(self, params: Mapping[str, mx.array]) -> Arrays:
        """The arrays as they start, all moments at zero, d at d0, and how many updates there were."""
        state = {"step": mx.zeros((), mx.int32), "numerator": mx.zeros((), mx.float32)}
        state["d"] = state["d_max"] = mx.array(self.d0, mx.float32)
        for name, value in params.items():
            state[f"{name}.start"] = value
            state |= {f"{name}.{moment}": mx.zeros_like(value) for moment in "mvs"}
        return state

    def update(
        self, params: Mapping[str, mx.array], grads: Mapping[str, mx.array], state: Arrays, lr: float | mx.array, go: Go = True
    ) -> tuple[Arrays, Arrays]:
        """One step down the gradient: the new arrays and the new state."""
        step, d = state["step"] + 1, state["d"]
        rate = d * lr
        if self.bias_correction:
            rate = rate * mx.sqrt(correction(self.beta2, step)) / correction(self.beta1, step)
        rate = mx.where(go, rate, 0.0)
        after = {"step": count(state["step"], go)} | self._distance(params, grads, state, rate, go)
        (old1, new1), (old2, new2) = weights(self.beta1, go), weights(self.beta2, go)
        fresh: Arrays = {}
        for name, value in params.items():
            grad = d * grads[name]
            m = old1 * state[f"{name}.m"] + new1 * grad
            v = old2 * state[f"{name}.v"] + new2 * mx.square(grad)
            fresh[name] = shrink(value, rate * self.weight_decay) - rate * m / (mx.sqrt(v) + after["d"] * self.eps)
            after |= {f"{name}.m": m, f"{name}.v": v, f"{name}.start": state[f"{name}.start"]}
        return fresh, after

    def _distance(
        self, params: Mapping[str, mx.array], grads: Mapping[str, mx.array], state: Arrays, rate: mx.array, go: Go
    ) -> Arrays:
        """d after this gradient, and what it is estimated from: how much of the gradient points away from the start."""
        d, kept = state["d"], mx.where(go, math.sqrt(self.beta2) if self.beta3 is None else self.beta3, 1.0)
        gain = d / self.d0 * (mx.where(go, d, 0.0) if self.safeguard_warmup else rate)
        after: Arrays = {}
        away, sizes = [], []
        for name in sorted(params):  # or a dict from a file, of another order, would add up to other last bits
            away.append(mx.sum(grads[name] * (state[f"{name}.start"] - params[name])))
            after[f"{name}.s"] = kept * state[f"{name}.s"] + gain * grads[name]
            sizes.append(mx.sum(mx.abs(after[f"{name}.s"])))
        numerator = kept * state["numerator"] + d / self.d0 * rate * mx.sum(mx.stack(away))
        size = mx.sum(mx.stack(sizes))
        estimate = mx.where(size > 0, self.d_coef * numerator / mx.where(size > 0, size, 1.0), d)
        longest = mx.maximum(state["d_max"], mx.where(go, estimate, 0.0))
        after |= {"numerator": numerator, "d_max": longest, "d": mx.where(go, longest, d)}
        if math.isfinite(self.growth_rate):  # the first estimate above d0 is believed, however large
            bound = mx.where(d == self.d0, mx.maximum(d, estimate), d) * self.growth_rate
            after["d"] = mx.where(go, mx.minimum(longest, bound), d)
        return after
