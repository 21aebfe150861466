"""DoRA: an adapter of the direction and the length of each row of a weight. Liu et al. 2024, arXiv 2402.09353.

y = x W'^T with W' = m (W + s B A) / |W + s B A|, row by row. m starts as |W|, so the first step sees the base model exactly.
In names of arrays: O outputs, c a chunk of them, I inputs, R rank, N tokens.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from stages.own_gradient import OwnGradient
from stages.tuner import quantize

MAGNITUDE = ".lora_magnitude_vector"  # (outputs,) float32; PEFT's name
CHUNK = 1 << 24  # values of a weight that exist in float32 at once: 64 MB


def row_norms(weight: quantize.Weight, down_RI: mx.array, up_OR: mx.array, scale: float) -> mx.array:
    """Euclidean norm of each row of W + scale B A, (outputs,) float32, computed in chunks of rows."""
    wide_RI = down_RI.astype(mx.float32)
    rows = max(1, CHUNK // down_RI.shape[1])
    norms: list[mx.array] = []
    for start in range(0, up_OR.shape[0], rows):
        which = slice(start, start + rows)
        up_cR = mx.depends([up_OR[which]], norms[-1:])[0] if norms else up_OR[which]  # one chunk exists at a time
        weight_cI = quantize.dense(quantize.select_rows(weight, which)).astype(mx.float32)
        adapted_cI = weight_cI + scale * (up_cR.astype(mx.float32) @ wide_RI)
        norms.append(mx.sqrt(mx.sum(mx.square(adapted_cI), axis=1)))
    return mx.concatenate(norms)


def initial_magnitude(weight: quantize.Weight, outputs: int, inputs: int) -> mx.array:
    # The same arithmetic as with a B of zeros: the norms are equal to the last bit, so a fresh adapter changes nothing.
    return row_norms(weight, mx.zeros((1, inputs)), mx.zeros((outputs, 1)), 0.0)


def rescale_rows(
    y: mx.array, magnitude_O: mx.array, weight: quantize.Weight, down_RI: mx.array, up_OR: mx.array, scale: float
) -> mx.array:
    """Turns `y`, the output with plain LoRA, into the output with DoRA."""
    # As in the paper (section 4.3) and in PEFT, the norm takes no gradient. It costs one more reading of the block's weights
    # than LoRA, and the outputs `y` are kept for the gradient of m.
    norm_O = mx.stop_gradient(row_norms(weight, down_RI, up_OR, scale))
    add_gain: Any = _add_gain
    rescaled: mx.array = add_gain(y, magnitude_O / norm_O - 1)
    return rescaled


@OwnGradient
def _add_gain(y: mx.array, gain_O: mx.array) -> mx.array:
    # 1 + gain is never formed: half precision would lose most bits of the gain.
    return y + gain_O.astype(y.dtype) * y


@_add_gain.vjp
def _add_gain_vjp(primals: Any, dz: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    y, gain_O = primals
    flat_NO = (dz * y).reshape(-1, y.shape[-1])
    # The sum over tokens as a matrix product, which adds in float32 on every backend; a half-precision sum does not.
    by_gain_O = (mx.ones((1, flat_NO.shape[0]), flat_NO.dtype) @ flat_NO)[0]
    return dz + gain_O.astype(y.dtype) * dz, by_gain_O.astype(gain_O.dtype)
