"""The frozen model of a run: how its weights are packed, and the adapter that [train] initial starts from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.models.family import Architecture, Family
from stages.models.protocols import Transformer
from stages.text_to_image.train.config import TrainConfig
from stages.tuner import quantize
from stages.tuner.adapters.initial import check_initial
from stages.tuner.adapters.targets import matches_pattern
from stages.tuner.config import longest_first
from stages.tuner.step import choose_targets
from stages.tuner.task import InitialAdapter


def load_transformer(path: Path, family: Family, config: TrainConfig) -> Transformer:
    """Load the transformer of `family` from the folder `path`. If the [train] settings `config` ask for it, each weight is packed
    (quantised) right after it is read.
    """
    arrange = packing(family.architecture, config)
    return family.architecture.load_transformer(path, family, getattr(mx, config.precision), arrange)


def packing(architecture: Architecture, config: TrainConfig) -> Callable[[str, mx.array], Any] | None:
    """Return a function that packs (quantises) a weight. Its arguments are the name of the weight and the weight
    itself. It returns the packed weight, or the weight unchanged if it cannot be packed. The [train] settings `config`
    give the number of bits. If they ask for no packing, the result is None.
    """
    if config.base_bits == 16 and not config.base_bits_for:
        return None
    return lambda name, weight: quantize.pack_if_possible(weight, weight_bits(name, architecture, config))


def weight_bits(name: str, architecture: Architecture, config: TrainConfig) -> int:
    """Return the bits per value of the weight `name`: 16, 8 or 4. The settings are [train] `base_bits` and `base_bits_for`.
    Weights outside the blocks have at least `architecture.outside_bits`.
    """
    if not architecture.in_block(name):
        return max(config.base_bits, architecture.outside_bits) if architecture.packs_outside(name) else 16
    linear = name.removesuffix(".weight")
    patterns = longest_first(config.base_bits_for)
    return next((bits for pattern, bits in patterns.items() if matches_pattern(linear, pattern)), config.base_bits)


def read_initial_adapter(file: Path, weights: Path, family: Family, config: TrainConfig) -> InitialAdapter:
    """Read the adapter `file` that a run starts from. Returns a pair of dicts: the float32 arrays by name, and the
    scale of each Linear layer by its name. `weights` is the folder of the transformer. Only the sizes of the
    transformer are read there, no weights. Raises ValueError if the adapter does not fit the model or the settings.
    """
    architecture = family.architecture
    meta = architecture.meta_transformer(architecture.transformer_config(weights, family), mx.float32)
    targets = choose_targets(meta.linears(), config)
    try:
        arrays, scales = architecture.read_adapter(file)
        check_initial(arrays, scales, targets)
    except ValueError as error:
        raise ValueError(f"[train] initial: {error}") from None
    return arrays, scales
