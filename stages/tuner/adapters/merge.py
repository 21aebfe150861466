"""Merging an adapter into the weight that it adapts. In names of arrays: O outputs, I inputs, R rank."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from stages.tuner import quantize
from stages.tuner.adapters import dora, full, lokr, lora


def merge(weight: quantize.Weight, arrays: Mapping[str, mx.array], scale: float) -> mx.array:
    """The unpacked weight with its adapter, in its own dtype; computed in float32 and rounded once."""
    # Not packed again afterwards: that would lose a change as small as an adapter's.
    dense_OI = quantize.dense(weight)
    wide_OI = dense_OI.astype(mx.float32)
    if full.DIFF in arrays:
        return (wide_OI + scale * arrays[full.DIFF]).astype(dense_OI.dtype)
    if lokr.W1 in arrays:
        return (wide_OI + scale * lokr.kronecker(arrays)).astype(dense_OI.dtype)
    down_RI, up_OR = arrays[lora.A].astype(mx.float32), arrays[lora.B].astype(mx.float32)
    merged_OI = wide_OI + scale * (up_OR @ down_RI)
    if dora.MAGNITUDE in arrays:
        norm_O = dora.row_norms(wide_OI, down_RI, up_OR, scale)
        merged_OI = (arrays[dora.MAGNITUDE] / norm_O)[:, None] * merged_OI
    return merged_OI.astype(dense_OI.dtype)


def check_shapes(shapes: Mapping[str, tuple[int, ...]], adapters: Mapping[str, mx.array], scales: Mapping[str, float]) -> None:
    """Raises ValueError unless the model has every Linear of the adapter in the same shape. `shapes`: by "<linear>.weight"."""
    for name in scales:
        shape, expected = lora.linear_shape(lora.arrays_of_linear(adapters, name)), shapes.get(f"{name}.weight")
        if expected is None:
            raise ValueError(f"the adapter has {name}, which the model lacks: is it an adapter of another model?")
        if expected != shape:
            raise ValueError(f"the adapter's {name} must have the shape {expected}, got {shape}: is it of another model?")
