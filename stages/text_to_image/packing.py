"""How the weights of a transformer are packed (quantised), for training and for drawing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stages.models.family import Architecture, Family
from stages.models.protocols import Transformer
from stages.tuner import quantize
from stages.tuner.adapters.targets import matches_pattern
from stages.tuner.config import longest_first
from stages.tuner.stored import WeightFolder

if TYPE_CHECKING:
    import mlx.core as mx


STREAMED = "streamed"  # folder of a table with the weights of blocks that stay on disk while a stage runs


class Packed(Protocol):
    """The settings that say how the weights of the transformer are stored. `base_bits` is the number of bits per weight
    of the blocks (layers). `base_bits_for` replaces this number for chosen linear layers of the blocks. `stream_blocks`
    says whether the weights of the blocks stay on disk.
    """

    @property
    def base_bits(self) -> int | None:
        """Bits per weight of the blocks: 16 (not packed), 8 or 4. None means 16."""

    @property
    def base_bits_for(self) -> Mapping[str, int] | None:
        """Bits per weight for chosen linear layers, as a dict from name pattern to 16, 8 or 4. For a layer that a
        pattern such as "attn.to_q" matches, this number replaces `base_bits`. If several patterns match a layer, the
        longest applies. None means that all layers use `base_bits`.
        """

    @property
    def stream_blocks(self) -> bool:
        """True if the weights of the blocks stay on disk. They are then read each time they are needed."""


def load_packed(path: Path, family: Family, dtype: Any, config: Packed, folder: Path | None = None) -> Transformer:
    """Load the transformer of `family` and return it. `path` is the folder or file with its weights. Each weight is
    cast to `dtype` and packed (quantised) as `config` says. If `config.stream_blocks` is true, the weight matrices of
    the blocks (layers) stay on disk. They are written into a new folder inside `folder`. The new folder is deleted with
    the transformer. Raises ValueError if `config.stream_blocks` is true and `folder` is None.
    """
    if config.stream_blocks and folder is None:
        raise ValueError("stream_blocks must be false here: there is no folder for the weights of the blocks")
    stored = WeightFolder(folder) if config.stream_blocks and folder else None
    architecture = family.architecture
    model = architecture.load_transformer(path, family, dtype, arranged(architecture, config, stored))
    if stored:
        stored.belongs_to(model)
    return model


def arranged(architecture: Architecture, config: Packed, stored: WeightFolder | None) -> Callable[[str, mx.array], Any] | None:
    """Return a function that prepares a weight after it is read, or None if no weight is changed. The function takes
    the weight's name and the weight. It returns the weight, packed (quantised) if `config` says so. `architecture`
    describes the kind of transformer. `stored` is a folder on disk for the weights of blocks (layers). If it is None,
    all weights stay in memory.

    If `stored` is given, the function writes each matrix of a block there. It then returns a `StoredWeight`, which can
    read the matrix again.
    """
    pack = packing(architecture, config)
    if stored is None:
        return pack

    def arrange(name: str, weight: mx.array) -> Any:
        packed = pack(name, weight) if pack else weight
        return stored.store(name, packed) if architecture.in_block(name) and weight.ndim == 2 else packed

    return arrange


def packing(architecture: Architecture, config: Packed) -> Callable[[str, mx.array], Any] | None:
    """Return a function that packs (quantises) a weight, or None if the settings ask for no packing. Call the function
    as `function(name, weight)`. It returns the packed weight. It returns the weight unchanged if the weight gets 16
    bits or has an unsuitable shape. `architecture` describes the kind of transformer. `config` gives the number of
    bits.
    """
    if (config.base_bits or 16) == 16 and not config.base_bits_for:
        return None
    return lambda name, weight: quantize.pack_if_possible(weight, weight_bits(name, architecture, config))


def weight_bits(name: str, architecture: Architecture, config: Packed) -> int:
    """Return the bits per value of one weight of the transformer: 16 (not packed), 8 or 4. `name` is the name of the
    weight, such as "transformer_blocks.0.attn.to_q.weight". `architecture` says which weights belong to blocks
    (layers). `config.base_bits` is the number of bits in blocks; None means 16. `config.base_bits_for` maps name
    patterns to other numbers for some linear layers of blocks. If several patterns match, the longest counts.

    Outside the blocks, a weight gets 16 bits. If `architecture.packs_outside(name)` is True, it gets `base_bits`
    instead, but at least `architecture.outside_bits`.
    """
    bits = config.base_bits or 16
    if not architecture.in_block(name):
        return max(bits, architecture.outside_bits) if architecture.packs_outside(name) else 16
    linear = name.removesuffix(".weight")
    patterns = longest_first(config.base_bits_for)
    return next((other for pattern, other in patterns.items() if matches_pattern(linear, pattern)), bits)
