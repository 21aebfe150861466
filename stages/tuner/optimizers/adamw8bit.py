"""AdamW with its moments in 8 bits a value, by blocks: after Dettmers et al. 2021, arXiv 2110.02861. Plain MLX operations.

A block is 256 values in a row with one float32 scale, its largest magnitude, which is thus kept exactly. A value x of
the block is stored as the nearest of 127 (255 without a sign) steps of |x / scale|^(1/4). The paper's table of values
spans seven decades; a second moment that falls below them becomes zero, and the step divided by it has no bound. Here
the levels are a formula, fine near the scale and down to 2e-10 of it, and only a zero is stored as zero.

N values of an array, K = ceil(N / 256) blocks of S = 256.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from stages.tuner.optimizers.adamw import AdamW, Arrays

BLOCK = 256


@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """AdamW in a quarter of its state: for large ranks, or where the last half gigabyte decides.

    A step computes in float32 and rounds only what it stores. StepResult on noisy gradients with a steady part of 0.3 of
    the noise: where a block's values are of one scale, the arrays end 1.4 % of the way they went from where float32
    moments lead, after 50 and 300 steps, and 2 % after 1000; where scales differ by a factor of e either way, 3 %, 5 %
    and 6.4 % (the paper's table of values: 5 %, 7 %, 9 %). Arrays of fewer values than a block keep float32 moments.
    """

    def _kept(self, key: str, moment: mx.array) -> Arrays:
        if moment.size < BLOCK:
            return {key: moment}
        padded = mx.pad(moment.reshape(-1), (0, -moment.size % BLOCK)) if moment.size % BLOCK else moment
        codes_KS, scale_K1 = quantize(padded.reshape(-1, BLOCK), signed=key.endswith(".m"))
        return {key: codes_KS, f"{key}.scale": scale_K1}

    def _read(self, state: Mapping[str, mx.array], key: str, like: mx.array) -> mx.array:
        if like.size < BLOCK:
            return state[key]
        return dequantize(state[key], state[f"{key}.scale"]).reshape(-1)[: like.size].reshape(like.shape)


def quantize(x_KS: mx.array, signed: bool) -> tuple[mx.array, mx.array]:
    """(codes_KS, scale_K1) of float32 blocks: int8 of -127 .. 127, or uint8 for values of no sign."""
    size_KS = mx.abs(x_KS)
    scale_K1 = mx.max(size_KS, axis=1, keepdims=True)
    share_KS = size_KS / mx.where(scale_K1 > 0, scale_K1, 1.0)
    level_KS = mx.round((127 if signed else 255) * mx.sqrt(mx.sqrt(share_KS)))
    if signed:
        return (level_KS * mx.sign(x_KS)).astype(mx.int8), scale_K1
    # A second moment of zero under a first moment that is not would be a step of m / eps.
    return mx.maximum(level_KS, (size_KS > 0).astype(mx.float32)).astype(mx.uint8), scale_K1


def dequantize(codes_KS: mx.array, scale_K1: mx.array) -> mx.array:
    """The float32 blocks that codes and scales stand for."""
    root_KS = codes_KS.astype(mx.float32) / (127 if codes_KS.dtype == mx.int8 else 255)
    return root_KS * mx.abs(root_KS) * mx.square(root_KS) * scale_K1
