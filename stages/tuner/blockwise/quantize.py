"""A base in 8 or 4 bits: weights kept packed, unpacked once per visit of a block.

I inputs, O outputs, G = I / 64 groups: every 64 weights of a row share a scale and an offset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx

GROUP = 64
CHUNK = 1 << 28  # bytes of a weight that is unpacked at once: of dev's Linears the largest has 0.68 GB
BITS = (8, 4)


class QuantizedWeight(NamedTuple):
    """A packed (O,I) weight. A tuple of arrays, so that it travels through mx.compile like any other weight."""

    packed: mx.array  # (O, I * bits / 32) uint32
    scales: mx.array  # (O, G)
    offsets: mx.array  # (O, G)

    @property
    def bits(self) -> int:
        """Bits per weight; the shapes tell."""
        return 32 * self.packed.shape[-1] // (GROUP * self.scales.shape[-1])

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.scales.shape[0], self.scales.shape[1] * GROUP

    def dense(self) -> mx.array:
        """The (O,I) weight that it stands for, in the dtype that it was packed from."""
        return mx.dequantize(*self, group_size=GROUP, bits=self.bits)


Weight = mx.array | QuantizedWeight


def pack(weight_OI: mx.array, bits: int) -> QuantizedWeight:
    """Pack a weight, at once: its bf16 array can be let go. ValueError for bits or a width that cannot be packed."""
    if bits not in BITS:
        raise ValueError(f"base_bits must be 8, 4 or 16 (not packed), not {bits}")
    if weight_OI.ndim != 2 or weight_OI.shape[-1] % GROUP:
        raise ValueError(f"a weight of shape {weight_OI.shape} cannot be packed: rows must be a multiple of {GROUP} wide")
    packed = QuantizedWeight(*mx.quantize(weight_OI, group_size=GROUP, bits=bits))
    mx.eval(*packed)
    return packed


def fit(weight: mx.array, bits: int) -> Weight:
    """A weight in that many bits: packed, at once, or as it is for 16 bits and where it is no matrix of whole groups.

    Done to one after another while loading, memory peaks at the packed size and one tensor.
    """
    fits = weight.ndim == 2 and weight.shape[-1] % GROUP == 0
    return pack(weight, bits) if bits < 16 and fits else weight


def dense(weight: Weight) -> mx.array:
    """The weight as one array."""
    return weight.dense() if isinstance(weight, QuantizedWeight) else weight


def rows(weight: Weight, which: slice) -> Weight:
    """Some rows of a weight: a view, or all of it."""
    if which == slice(None):
        return weight
    return weight[which] if isinstance(weight, mx.array) else QuantizedWeight(*(part[which] for part in weight))


def chunks(weight: Weight) -> list[slice]:
    """All rows, in chunks of at most CHUNK bytes unpacked; in one, where the weight is small or not packed."""
    if isinstance(weight, mx.array):
        return [slice(None)]
    total, size = weight.shape[0], weight.shape[0] * weight.shape[1] * weight.scales.dtype.size
    step = -(-total // -(-size // CHUNK))
    return [slice(start, min(start + step, total)) for start in range(0, total, step)] if step < total else [slice(None)]


def following(weight: QuantizedWeight, after: mx.array) -> QuantizedWeight:
    """The same weight, not unpacked before `after` is computed."""
    return weight._replace(packed=mx.depends([weight.packed], [after])[0])


def nbytes(weights: Mapping[str, Weight]) -> int:
    """Bytes of all weights as they are kept."""
    return sum(sum(part.nbytes for part in w) if isinstance(w, QuantizedWeight) else w.nbytes for w in weights.values())
