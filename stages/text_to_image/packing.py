"""How the weights of a transformer are packed (quantised), for training and for drawing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stages.models.family import Architecture, Family, Transformer
from stages.tuner import quantize
from stages.tuner.adapters.targets import matches_pattern
from stages.tuner.config import longest_first
from stages.tuner.stored import WeightFolder

if TYPE_CHECKING:
    import mlx.core as mx


STREAMED = "streamed"  # folder of a table with the weights of blocks that stay on disk while a stage runs


class Packed(Protocol):
    @property
    def base_bits(self) -> int | None:
        """Of the blocks: 16, 8 or 4; None: 16."""

    @property
    def base_bits_for(self) -> Mapping[str, int] | None:
        """Other bits by pattern of Linears, the longest that matches."""

    @property
    def stream_blocks(self) -> bool:
        """The blocks' weights stay on disk and are read each time."""


def load_packed(path: Path, family: Family, dtype: Any, config: Packed, folder: Path | None = None) -> Transformer:
    """With `stream_blocks`, the blocks' matrices go into a new folder in `folder`, deleted with the model."""
    if config.stream_blocks and folder is None:
        raise ValueError("stream_blocks must be false here: there is no folder for the weights of the blocks")
    stored = WeightFolder(folder) if config.stream_blocks and folder else None
    architecture = family.architecture
    model = architecture.load_transformer(path, family, dtype, arranged(architecture, config, stored))
    if stored:
        stored.belongs_to(model)
    return model


def arranged(architecture: Architecture, config: Packed, stored: WeightFolder | None) -> Callable[[str, mx.array], Any] | None:
    """What to do with a weight once it is read: pack it, and store the matrices of blocks. None: nothing."""
    pack = packing(architecture, config)
    if stored is None:
        return pack

    def arrange(name: str, weight: mx.array) -> Any:
        packed = pack(name, weight) if pack else weight
        return stored.store(name, packed) if architecture.in_block(name) and weight.ndim == 2 else packed

    return arrange


def packing(architecture: Architecture, config: Packed) -> Callable[[str, mx.array], Any] | None:
    """Packs a weight as `config` says; None: nothing is packed."""
    if (config.base_bits or 16) == 16 and not config.base_bits_for:
        return None
    return lambda name, weight: quantize.pack_if_possible(weight, weight_bits(name, architecture, config))


def weight_bits(name: str, architecture: Architecture, config: Packed) -> int:
    """16, 8 or 4 for one weight. Outside the blocks: 16, or base_bits but at least the architecture's `outside_bits`."""
    bits = config.base_bits or 16
    if not architecture.in_block(name):
        return max(bits, architecture.outside_bits) if architecture.packs_outside(name) else 16
    linear = name.removesuffix(".weight")
    patterns = longest_first(config.base_bits_for)
    return next((other for pattern, other in patterns.items() if matches_pattern(linear, pattern)), bits)
