"""DoRA: y = x W'^T with W' = m (W + s B A) / |W + s B A|, row by row. Liu et al. 2024, arXiv 2402.09353.

The low-rank pair A, B sets the direction of each row of the weight, the magnitude m its norm. As in the paper (section 4.3)
and in PEFT, the norm |W + s B A| takes no gradient. m starts as |W|, so that the first step sees the base model exactly.

Cost beside LoRA: each visit of a block reads its weights once more and computes s B A for the norms, in chunks of rows, so
that no second weight exists at once; and the outputs of adapted Linears are kept for the gradient of m.

In names of arrays: O outputs, c a chunk of them, I inputs, R rank, N tokens.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from stages.tuner import quantize

MAGNITUDE = ".lora_magnitude_vector"  # (outputs,) float32; PEFT's name
CHUNK = 1 << 24  # values of a weight that exist in float32 at once: 64 MB


def row_norms(weight: quantize.Weight, down_RI: mx.array, up_OR: mx.array, scale: float) -> mx.array:
    """Return the Euclidean norm of each row of W + scale B A: shape (outputs,), float32, lazy. `weight` is W, (outputs,
    inputs), dense or packed; `down_RI` is A, (rank, inputs); `up_OR` is B, (outputs, rank). W is unpacked and widened to
    float32 a chunk of rows at a time.
    """
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
    """Return DoRA's magnitudes before the first step, the norms of the rows of an (outputs, inputs) weight: shape (outputs,),
    float32. They equal `row_norms` to the bit as long as B is zero, so that the adapter changes nothing.
    """
    return row_norms(weight, mx.zeros((1, inputs)), mx.zeros((outputs, 1)), 0.0)


def rescale_rows(
    y: mx.array, magnitude_O: mx.array, weight: quantize.Weight, down_RI: mx.array, up_OR: mx.array, scale: float
) -> mx.array:
    """Turn LoRA's output y, (..., outputs), into DoRA's: multiply it by magnitude / `row_norms`, per output. `magnitude_O` has
    the shape (outputs,); the other arguments are those of `row_norms`. Returns the dtype of y. The gradient goes to y and the
    magnitudes, and not through the norms.
    """
    norm_O = mx.stop_gradient(row_norms(weight, down_RI, up_OR, scale))
    add_gain: Any = _add_gain
    rescaled: mx.array = add_gain(y, magnitude_O / norm_O - 1)
    return rescaled


@mx.custom_function
def _add_gain(y: mx.array, gain_O: mx.array) -> mx.array:
    """Return (1 + gain) y. The gain, (outputs,), is small: added to 1 first, it would lose most of its bits in half precision."""
    return y + gain_O.astype(y.dtype) * y


@_add_gain.vjp  # type: ignore[untyped-decorator, unused-ignore]
def _add_gain_vjp(primals: Any, dz: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    """Gradients of `_add_gain`. The sum over tokens is a matrix product, which adds up in float32 on every backend; a
    half-precision sum does not.
    """
    y, gain_O = primals
    flat_NO = (dz * y).reshape(-1, y.shape[-1])
    by_gain_O = (mx.ones((1, flat_NO.shape[0]), flat_NO.dtype) @ flat_NO)[0]
    return dz + gain_O.astype(y.dtype) * dz, by_gain_O.astype(gain_O.dtype)
