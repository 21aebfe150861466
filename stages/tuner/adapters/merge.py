"""An adapter put into the weight that it adapts, so that no reader needs to know adapters.

O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import mlx.core as mx

from stages.tuner.adapters import dora, lokr, lora
from stages.tuner.blockwise import quantize


def merge(weight: quantize.Weight, arrays: Mapping[str, mx.array], scale: float) -> mx.array:
    """The (O,I) weight that gives what `lora.linear` gives; `arrays` are one Linear's, keyed by their endings.

    Computed in float32 and rounded once, to the dtype of the weight. A packed weight comes back dense: packed again, it
    would lose the small change that an adapter is.
    """
    dense_OI = quantize.dense(weight)
    wide_OI = dense_OI.astype(mx.float32)
    if lokr.W1 in arrays:
        return (wide_OI + scale * lokr.product(arrays)).astype(dense_OI.dtype)
    down_RI, up_OR = arrays[lora.A].astype(mx.float32), arrays[lora.B].astype(mx.float32)
    moved_OI = wide_OI + scale * (up_OR @ down_RI)
    if dora.MAGNITUDE in arrays:
        length_O = dora.lengths(wide_OI, down_RI, up_OR, scale)
        moved_OI = (arrays[dora.MAGNITUDE] / length_O)[:, None] * moved_OI
    return moved_OI.astype(dense_OI.dtype)


def merged(
    weights: Mapping[str, quantize.Weight], adapters: Mapping[str, mx.array], scales: Mapping[str, float]
) -> Iterator[tuple[str, quantize.Weight]]:
    """Every weight by its name, "<linear>.weight" and the like, the adapted ones merged, one at a time.

    ValueError for an adapter of a Linear that is not there, or of another size.
    """
    check({key: tuple(weight.shape) for key, weight in weights.items()}, adapters, scales)
    for key, weight in weights.items():
        name = key.removesuffix(".weight")
        yield key, merge(weight, lora.of_linear(adapters, name), scales[name]) if name in scales else weight


def check(shapes: Mapping[str, tuple[int, ...]], adapters: Mapping[str, mx.array], scales: Mapping[str, float]) -> None:
    """ValueError for an adapter of a Linear that is not among the weights of these shapes, or of another size."""
    for name in scales:
        shape, found = lora.shape_of(lora.of_linear(adapters, name)), shapes.get(f"{name}.weight")
        if found != shape:
            raise ValueError(f"the adapter is for {name} of shape {shape}; the model's is {found or 'not there'}")
