"""Frozen weights packed in 8 or 4 bits, unpacked at each visit of a block.

Every 64 weights of a row share a scale and an offset.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import mlx.core as mx

Bits = Literal[16, 8, 4]  # of a weight; 16 is not packed
BITS: tuple[Bits, ...] = get_args(Bits)
GROUP = 64  # weights of a row that share a scale and an offset
CHUNK = 1 << 28  # bytes of a weight that are unpacked at once; FLUX.2 dev's largest Linear has 0.68 GB


class QuantizedWeight(NamedTuple):
    """A packed (outputs, inputs) weight as a tuple of three arrays: `packed`, uint32, (outputs, inputs * bits / 32), `scales`
    and `offsets`, (outputs, inputs / 64). mx.compile takes it like any tuple of arrays.
    """

    packed: mx.array
    scales: mx.array
    offsets: mx.array

    @property
    def bits(self) -> int:
        """Bits per weight, 8 or 4; the shapes of the arrays imply it."""
        return 32 * self.packed.shape[-1] // (GROUP * self.scales.shape[-1])

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (outputs, inputs) of the unpacked weight."""
        return self.scales.shape[0], self.scales.shape[1] * GROUP

    def dense(self) -> mx.array:
        """Return the unpacked (outputs, inputs) weight in the dtype that it was packed from."""
        return mx.dequantize(*self, group_size=GROUP, bits=self.bits)


Weight = mx.array | QuantizedWeight


def pack(weight: mx.array, bits: int) -> QuantizedWeight:
    """Pack a matrix (outputs, inputs) in 8 or 4 bits. It is evaluated at once, so that the original can be freed. ValueError
    for other bits, or a shape that cannot be packed, see `is_packable`.
    """
    if bits == 16 or bits not in BITS:
        raise ValueError(f"base_bits must be 16 (not packed), 8 or 4, got {bits}")
    if not is_packable(weight.shape):
        raise ValueError(f"a packed weight must be a matrix with rows a multiple of {GROUP} wide, got shape {weight.shape}")
    packed = QuantizedWeight(*mx.quantize(weight, group_size=GROUP, bits=bits))
    mx.eval(*packed)
    return packed


def pack_if_possible(weight: mx.array, bits: int) -> Weight:
    """Pack a weight in 8 or 4 bits, or return it unchanged if `bits` is 16 or its shape cannot be packed, as that of a norm's
    scale.

    Applied to one weight after another while loading, memory peaks at the packed size and one tensor.
    """
    return pack(weight, bits) if bits < 16 and is_packable(weight.shape) else weight


def is_packable(shape: tuple[int, ...]) -> bool:
    """Whether a weight of this shape can be packed: a matrix whose rows are a multiple of 64 wide."""
    return len(shape) == 2 and shape[-1] % GROUP == 0


def dense(weight: Weight) -> mx.array:
    """Return the weight as one array, unpacked if it is packed."""
    return weight.dense() if isinstance(weight, QuantizedWeight) else weight


def select_rows(weight: Weight, rows: slice) -> Weight:
    """Return the rows that a slice selects, still packed if the weight is packed; `slice(None)` returns the weight itself."""
    if rows == slice(None):
        return weight
    return weight[rows] if isinstance(weight, mx.array) else QuantizedWeight(*(array[rows] for array in weight))


def row_chunks(weight: Weight) -> list[slice]:
    """Return slices that together cover all rows of a weight, each of at most 256 MiB (CHUNK) when unpacked. A weight that is
    small or not packed has one slice, `slice(None)`.
    """
    if isinstance(weight, mx.array):
        return [slice(None)]
    total, size = weight.shape[0], weight.shape[0] * weight.shape[1] * weight.scales.dtype.size
    step = -(-total // -(-size // CHUNK))
    return [slice(start, min(start + step, total)) for start in range(0, total, step)] if step < total else [slice(None)]


def unpack_after(weight: QuantizedWeight, after: mx.array) -> QuantizedWeight:
    """Return the same packed weight with a dependency: it is not unpacked before the array `after` is computed."""
    return weight._replace(packed=mx.depends([weight.packed], [after])[0])
