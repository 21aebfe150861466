"""AdamW: Adam with decoupled weight decay. Kingma and Ba 2015, arXiv 1412.6980; Loshchilov and Hutter 2019, arXiv 1711.05101.

AdamW8bit keeps its moments in 8 bits per value, in K blocks of S = 256; after Dettmers et al. 2021, arXiv 2110.02861.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from stages.tuner.optimizers.optimizer import Flag, Params, bias_correction, decayed, mean_weights
from stages.tuner.weights import Arrays


@dataclass(frozen=True)
class AdamW:
    """The optimizer to begin with: published LoRA recipes are stated for it. Its state is twice the trained arrays."""

    usual_lr: ClassVar[float] = 1e-4
    coupled: ClassVar[bool] = False

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def init(self, params: Params) -> Arrays:
        state = {"step": mx.zeros((), mx.int32)}
        for name, value in params.items():
            for moment in "mv":
                state |= self._store(f"{name}.{moment}", mx.zeros_like(value), signed=moment == "m")
        return state

    def update(
        self, params: Params, grads: Params, state: Arrays, lr: float | mx.array, apply: Flag = True
    ) -> tuple[Arrays, Arrays]:
        step = state["step"] + 1
        rate, root = mx.where(apply, lr / bias_correction(self.beta1, step), 0.0), mx.sqrt(bias_correction(self.beta2, step))
        (old1, new1), (old2, new2) = mean_weights(self.beta1, apply), mean_weights(self.beta2, apply)
        decay = mx.where(apply, lr * self.weight_decay, 0.0)
        new_params: Arrays = {}
        new_state: Arrays = {"step": state["step"] + apply}
        for name, value in params.items():
            grad = grads[name]
            m = old1 * self._load(state, f"{name}.m", value) + new1 * grad
            v = old2 * self._load(state, f"{name}.v", value) + new2 * mx.square(grad)
            new_params[name] = decayed(value, decay) - rate * m / (mx.sqrt(v) / root + self.eps)
            new_state |= self._store(f"{name}.m", m, signed=True) | self._store(f"{name}.v", v, signed=False)
        return new_params, new_state

    def _store(self, key: str, moment: mx.array, signed: bool) -> Arrays:
        """What the state holds of a moment. A subclass may store several arrays, whose keys begin with `key`."""
        return {key: moment}

    def _load(self, state: Params, key: str, like: mx.array) -> mx.array:
        return state[key]


# A value x is stored as the nearest of 127 levels (255 without a sign) of |x / scale|^(1/4), where scale is the largest magnitude
# of its block. The levels go down to 2e-10 of the scale, and only zero is stored as zero. Arrays of fewer than BLOCK values stay
# in float32.
BLOCK = 256


# The paper's table of levels spans seven decades. A second moment that falls below them becomes zero, and the step divided by it
# has no bound. With noisy gradients whose steady part was 0.3 of the noise, the parameters ended near those of float32 moments:
# 1.4 % of the path away after 50 and 300 steps, 2 % after 1000. With scales that differ by a factor of e either way within a
# block it was 3 %, 5 % and 6.4 % (with the paper's table: 5 %, 7 % and 9 %).
@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """AdamW with a quarter of its state, for large ranks. Steps are in float32."""

    def _store(self, key: str, moment: mx.array, signed: bool) -> Arrays:
        if moment.size < BLOCK:
            return {key: moment}
        padded = mx.pad(moment.reshape(-1), (0, -moment.size % BLOCK)) if moment.size % BLOCK else moment
        codes_KS, scale_K1 = quantize(padded.reshape(-1, BLOCK), signed)
        return {key: codes_KS, f"{key}.scale": scale_K1}

    def _load(self, state: Params, key: str, like: mx.array) -> mx.array:
        if like.size < BLOCK:
            return state[key]
        return dequantize(state[key], state[f"{key}.scale"]).reshape(-1)[: like.size].reshape(like.shape)


def quantize(x_KS: mx.array, signed: bool) -> tuple[mx.array, mx.array]:
    """int8 codes (uint8 if not `signed`) and scales (K, 1)."""
    size_KS = mx.abs(x_KS)
    scale_K1 = mx.max(size_KS, axis=1, keepdims=True)
    share_KS = size_KS / mx.where(scale_K1 > 0, scale_K1, 1.0)
    level_KS = mx.round((127 if signed else 255) * mx.sqrt(mx.sqrt(share_KS)))
    if signed:
        return (level_KS * mx.sign(x_KS)).astype(mx.int8), scale_K1
    # A second moment rounded to zero under a first moment that is not zero would make a step of m / eps.
    return mx.maximum(level_KS, (size_KS > 0).astype(mx.float32)).astype(mx.uint8), scale_K1


def dequantize(codes_KS: mx.array, scale_K1: mx.array) -> mx.array:
    root_KS = codes_KS.astype(mx.float32) / (127 if codes_KS.dtype == mx.int8 else 255)
    return root_KS * mx.abs(root_KS) * mx.square(root_KS) * scale_K1
