"""Frozen weights packed in 8 or 4 bits, and unpacked each time that a block is computed.

Every 64 weights of a row share a scale and an offset.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import mlx.core as mx

from stages import kernels

Bits = Literal[16, 8, 4]  # bits per weight; 16 means not packed
BITS: tuple[Bits, ...] = get_args(Bits)
GROUP = 64  # weights of a row that share a scale and an offset
CHUNK = 1 << 28  # bytes of a weight that are unpacked at once; FLUX.2 dev's largest Linear has 0.68 GB


class QuantizedWeight(NamedTuple):
    """A weight matrix (outputs, inputs) that is packed, which means quantised to 8 or 4 bits. It is a named tuple of three
    arrays. `packed` is uint32, (outputs, inputs * bits / 32). `scales` and `offsets` are (outputs, inputs / 64). Each 64 weights
    of a row share one scale and one offset. mx.compile accepts the tuple as an argument.
    """

    packed: mx.array
    scales: mx.array
    offsets: mx.array

    @property
    def bits(self) -> int:
        """The number of bits per weight, 8 or 4, derived from the shapes of the arrays."""
        return 32 * self.packed.shape[-1] // (GROUP * self.scales.shape[-1])

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (outputs, inputs) of the unpacked weight."""
        return self.scales.shape[0], self.scales.shape[1] * GROUP

    def dense(self) -> mx.array:
        """Return the unpacked weight, (outputs, inputs), in the dtype that the weight had before it was packed."""
        return mx.dequantize(*self, group_size=GROUP, bits=self.bits)


Weight = mx.array | QuantizedWeight


def pack(weight: mx.array, bits: int) -> QuantizedWeight:
    """Pack (quantise) a weight matrix (outputs, inputs) to 8 or 4 bits, and return the packed weight. `weight` must be a matrix
    with `inputs` a multiple of 64. `bits` is 8 or 4. The result is computed at once. The caller can therefore free the original.
    Raises ValueError for another `bits` or an unsuitable `weight`.
    """
    if bits == 16 or bits not in BITS:
        raise ValueError(f"base_bits must be 16 (not packed), 8 or 4, got {bits}")
    if not is_packable(weight.shape):
        raise ValueError(f"a packed weight must be a matrix with rows a multiple of {GROUP} wide, got shape {weight.shape}")
    packed = QuantizedWeight(*mx.quantize(weight, group_size=GROUP, bits=bits))
    mx.eval(*packed)
    return packed


def pack_if_possible(weight: mx.array, bits: int) -> Weight:
    """Return a weight packed (quantised) to `bits` bits, or unchanged. `bits` is 8 or 4, or 16 for no packing. Only a matrix
    (outputs, inputs) with `inputs` a multiple of 64 is packed. Any other weight is returned unchanged.

    If the weights are packed one after another while they are loaded, memory peaks at the packed size plus one weight.
    """
    return pack(weight, bits) if bits < 16 and is_packable(weight.shape) else weight


def is_packable(shape: tuple[int, ...]) -> bool:
    """Return True if a weight of this shape can be packed (quantised). It must be a matrix (outputs, inputs) with `inputs` a
    multiple of 64.
    """
    return len(shape) == 2 and shape[-1] % GROUP == 0


def dense(weight: Weight) -> mx.array:
    """Return the weight as one array (outputs, inputs). A packed weight is unpacked; an array is returned as it is."""
    return weight.dense() if isinstance(weight, QuantizedWeight) else weight


def select_rows(weight: Weight, rows: slice) -> Weight:
    """Return some rows (outputs) of a weight. The slice `rows` selects them. A packed weight stays packed. `slice(None)` returns
    the weight itself.
    """
    if rows == slice(None):
        return weight
    return weight[rows] if isinstance(weight, mx.array) else QuantizedWeight(*(array[rows] for array in weight))


def row_chunks(weight: Weight, tokens: int = 1) -> list[slice]:
    """Divide the rows (outputs) of a weight into chunks. Return the chunks as slices, in order. `weight` is a matrix (outputs,
    inputs), packed (quantised) or not. `tokens` is the number of input rows that the weight is multiplied with. If all rows fit
    into one chunk, the result is `[slice(None)]`.

    A chunk of a packed weight has at most 256 MiB when unpacked. On Metal, one kernel must also be able to compute the product
    of a chunk with `tokens` input rows.
    """
    total, inputs = weight.shape
    most = kernels.most_outputs(tokens, inputs)
    if isinstance(weight, QuantizedWeight):
        unpacked = max(1, CHUNK // (inputs * weight.scales.dtype.size))
        most = min(most or unpacked, unpacked)
    return kernels.slices(total, most)


def unpack_after(weight: QuantizedWeight, after: mx.array) -> QuantizedWeight:
    """Return the packed weight, with a dependency that delays its unpacking. MLX unpacks it only after the array
    `after` is computed. The values do not change.
    """
    return weight._replace(packed=mx.depends([weight.packed], [after])[0])
