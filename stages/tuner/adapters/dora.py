"""DoRA: an adapter that changes the direction and the length of each row of a weight matrix. Liu et al. 2024, arXiv
2402.09353.

The output is y = x W'^T with W' = m (W + s B A) / |W + s B A|, row by row. W is the frozen weight. The low-rank matrices A
and B, with the scale s, change the direction of each row; m is the trained length of each row. As in the paper (section
4.3) and in PEFT, the norm |W + s B A| takes no gradient. m starts as |W|, so the first step sees the base model exactly.

Cost compared with LoRA: each time a block is computed, its weights are read once more to compute s B A for the norms. This
is done in chunks of rows, so that no second weight exists at once. The outputs of adapted Linears are kept for the gradient
of m.

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
    """Return the Euclidean norm of each row of the adapted weight W + scale B A, as a float32 array (outputs,). `weight` is W,
    the frozen weight (outputs, inputs). It may be an array or packed in 8 or 4 bits. `down_RI` is A, the adapter's array (rank,
    inputs). `up_OR` is B, the adapter's array (outputs, rank). `scale` multiplies B A.

    W is unpacked and converted to float32 in chunks of rows.
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
    """Return the magnitudes with which DoRA starts, as a float32 array (outputs,). A magnitude is the Euclidean norm of one row
    of the frozen weight. `weight` is an array (outputs, inputs), or packed in 8 or 4 bits. `outputs` and `inputs` are its numbers
    of rows and columns.

    The magnitudes equal `row_norms` to the bit while B is zero. A fresh adapter therefore changes nothing.
    """
    return row_norms(weight, mx.zeros((1, inputs)), mx.zeros((outputs, 1)), 0.0)


def rescale_rows(
    y: mx.array, magnitude_O: mx.array, weight: quantize.Weight, down_RI: mx.array, up_OR: mx.array, scale: float
) -> mx.array:
    """Convert the output of a Linear with plain LoRA into its output with DoRA, and return it, `(..., outputs)`. `y` is
    the output with plain LoRA, in the same shape. Value n along its last axis is multiplied by `magnitude_O[n]` and
    divided by the norm of row n of `W + scale B A`. `magnitude_O` has the shape `(outputs,)`. `weight` is the frozen
    `W`, `(outputs, inputs)`, and may be quantised. `down_RI` is `A`, `(rank, inputs)`. `up_OR` is `B`, `(outputs,
    rank)`. `scale` is a number.

    The norm is Euclidean. No gradient flows through the norm.
    """
    norm_O = mx.stop_gradient(row_norms(weight, down_RI, up_OR, scale))
    add_gain: Any = _add_gain
    rescaled: mx.array = add_gain(y, magnitude_O / norm_O - 1)
    return rescaled


@OwnGradient
def _add_gain(y: mx.array, gain_O: mx.array) -> mx.array:
    """Return `y + gain_O * y`, in the dtype of `y`. `y` has the shape `(..., outputs)`. `gain_O` has the shape
    `(outputs,)`. Each output channel is thus multiplied by 1 plus its gain.

    The sum 1 + gain_O is never formed, because half precision would lose most bits of the gain.
    """
    return y + gain_O.astype(y.dtype) * y


@_add_gain.vjp
def _add_gain_vjp(primals: Any, dz: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    """Return the pair of gradients of `_add_gain` with respect to its inputs `y` and `gain_O`. `primals` is `(y,
    gain_O)`. `dz` is the gradient of the loss with respect to the output. The third argument, the output itself, is not
    used.

    The sum over tokens is a matrix product. It adds in float32 on every backend; a half-precision sum does not.
    """
    y, gain_O = primals
    flat_NO = (dz * y).reshape(-1, y.shape[-1])
    by_gain_O = (mx.ones((1, flat_NO.shape[0]), flat_NO.dtype) @ flat_NO)[0]
    return dz + gain_O.astype(y.dtype) * dz, by_gain_O.astype(gain_O.dtype)
