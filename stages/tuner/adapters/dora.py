"""DoRA: y = x W'^T with W' = m (W + s B A) / |W + s B A|, row by row. Liu et al. 2024, arXiv 2402.09353.

The low-rank pair turns each row of the weight, the magnitude m (O,) sets its length. As in the paper (section 4.3) and in
PEFT, the length |W + s B A| takes no gradient. m starts as |W|, so that the first step sees the base exactly.

What it costs beside LoRA: at every visit of a block its weights are read once more and s B A is built, for the lengths
(rows in chunks, so no second weight exists at once); and the outputs of its adapted Linears are kept for the gradient by m.

O outputs, c some of them, I inputs, R rank.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from stages.tuner.blockwise import quantize

MAGNITUDE = ".lora_magnitude_vector"  # (O,) float32; PEFT's name
CHUNK = 1 << 24  # values of a weight in float32 at once: 64 MB


def lengths(weight: quantize.Weight, down_RI: mx.array, up_OR: mx.array, scale: float) -> mx.array:
    """The length of each row of W + scale B A: (O,) float32, computed in float32. A packed W counts as what it stands for."""
    wide_RI = down_RI.astype(mx.float32)
    rows = max(1, CHUNK // down_RI.shape[1])
    found: list[mx.array] = []
    for start in range(0, up_OR.shape[0], rows):
        which = slice(start, start + rows)
        up_cR = mx.depends([up_OR[which]], found[-1:])[0] if found else up_OR[which]  # or all chunks would be there together
        weight_cI = quantize.dense(quantize.rows(weight, which)).astype(mx.float32)
        moved_cI = weight_cI + scale * (up_cR.astype(mx.float32) @ wide_RI)
        found.append(mx.sqrt(mx.sum(mx.square(moved_cI), axis=1)))
    return mx.concatenate(found)


def start(weight: quantize.Weight, outputs: int, inputs: int) -> mx.array:
    """The magnitudes that leave W as it is: (O,) float32, to the bit what `lengths` finds while B is zero."""
    return lengths(weight, mx.zeros((1, inputs)), mx.zeros((outputs, 1)), 0.0)


def stretch(
    y: mx.array, magnitude_O: mx.array, weight: quantize.Weight, down_RI: mx.array, up_OR: mx.array, scale: float
) -> mx.array:
    """y = x (W + scale B A)^T, with every row of the weight brought to its length. In the dtype of y."""
    length_O = mx.stop_gradient(lengths(weight, down_RI, up_OR, scale))
    grown: Any = _grown
    stretched: mx.array = grown(y, magnitude_O / length_O - 1)
    return stretched


@mx.custom_function
def _grown(y: mx.array, gain_O: mx.array) -> mx.array:
    """(1 + gain) y, where gain is small: beside 1, half precision would lose most of its bits."""
    return y + gain_O.astype(y.dtype) * y


@_grown.vjp  # type: ignore[untyped-decorator, unused-ignore]
def _grown_vjp(primals: Any, dz: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    """The sum over tokens is a matrix product: those add up in float32 on every backend, sums in half precision do not."""
    y, gain_O = primals
    flat_NO = (dz * y).reshape(-1, y.shape[-1])
    by_gain_O = (mx.ones((1, flat_NO.shape[0]), flat_NO.dtype) @ flat_NO)[0]
    return dz + gain_O.astype(y.dtype) * dz, by_gain_O.astype(gain_O.dtype)
