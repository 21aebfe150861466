"""AdamW with moments of 8 bits per value, in blocks. After Dettmers et al. 2021, arXiv 2110.02861. K blocks of S = 256."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from stages.tuner.optimizers.adamw import AdamW
from stages.tuner.optimizers.protocol import Arrays

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

    def _store(self, key: str, moment: mx.array) -> Arrays:
        if moment.size < BLOCK:
            return {key: moment}
        padded = mx.pad(moment.reshape(-1), (0, -moment.size % BLOCK)) if moment.size % BLOCK else moment
        codes_KS, scale_K1 = quantize(padded.reshape(-1, BLOCK), signed=key.endswith(".m"))
        return {key: codes_KS, f"{key}.scale": scale_K1}

    def _load(self, state: Mapping[str, mx.array], key: str, like: mx.array) -> mx.array:
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
