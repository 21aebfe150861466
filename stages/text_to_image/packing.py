"""How the weights of a transformer are packed (quantised), for training and for drawing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from stages.models.family import Architecture
from stages.tuner import quantize
from stages.tuner.adapters.targets import matches_pattern
from stages.tuner.config import longest_first

if TYPE_CHECKING:
    import mlx.core as mx


class Packed(Protocol):
    """Settings that say how many bits a weight of the transformer takes."""

    @property
    def base_bits(self) -> int | None:
        """Bits per weight of the blocks: 16 (not packed), 8 or 4. None means 16."""

    @property
    def base_bits_for(self) -> Mapping[str, int] | None:
        """Bits per weight for certain Linears, as a dict from name pattern to 16, 8 or 4. They replace `base_bits`. If
        several patterns match a Linear, the longest applies. None means that `base_bits` applies to all.
        """


def packing(architecture: Architecture, config: Packed) -> Callable[[str, mx.array], Any] | None:
    """Return a function that packs (quantises) a weight. Its arguments are the name of the weight and the weight
    itself. It returns the packed weight, or the weight unchanged if it cannot be packed. `config` gives the number of
    bits. If it asks for no packing, the result is None.
    """
    if (config.base_bits or 16) == 16 and not config.base_bits_for:
        return None
    return lambda name, weight: quantize.pack_if_possible(weight, weight_bits(name, architecture, config))


def weight_bits(name: str, architecture: Architecture, config: Packed) -> int:
    """Return the bits per value of the weight `name`: 16, 8 or 4. `config` holds the settings `base_bits` and
    `base_bits_for`. Weights outside the blocks have at least `architecture.outside_bits`.
    """
    bits = config.base_bits or 16
    if not architecture.in_block(name):
        return max(bits, architecture.outside_bits) if architecture.packs_outside(name) else 16
    linear = name.removesuffix(".weight")
    patterns = longest_first(config.base_bits_for)
    return next((other for pattern, other in patterns.items() if matches_pattern(linear, pattern)), bits)
