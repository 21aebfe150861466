"""Load the transformer and the autoencoder, from the diffusers layout or the model makers' single files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.models import weights
from stages.models.family import Family
from stages.models.flux2 import autoencoder, key_maps
from stages.models.flux2.autoencoder_config import AutoencoderConfig
from stages.models.flux2.config import Flux2Config
from stages.models.flux2.transformer import Flux2
from stages.models.folders import component_config, read_config


def transformer_config(path: Path | None, family: Family) -> Flux2Config:
    """From the config.json at `path`, else from `family`. Raises ValueError if it is not that of a FLUX.2 transformer."""
    return Flux2Config.from_dict(component_config(path, family.transformer) if path else family.transformer)


def load_flux2(path: Path, family: Family, dtype: Any = None, arrange: Callable[[str, mx.array], Any] | None = None) -> Flux2:
    """See `Architecture.load_transformer`. Raises ValueError if a weight is missing, unknown, damaged or of another shape."""
    config = transformer_config(path, family)
    foreign = key_maps.is_single_file(weights.read_keys(path))
    arrays = weights.load_component(
        path,
        config.shapes(),
        convert=(lambda found: key_maps.transformer_to_diffusers(found, path)) if foreign else None,
        rename=None if foreign else key_maps.from_mflux,
        dtype=dtype,
        arrange=arrange,
    )
    return Flux2(config, arrays)


def load_autoencoder(path: Path, family: Family, dtype: Any = None) -> autoencoder.Autoencoder:
    """Weights in `dtype`, or as stored; the statistics of the latents always in float32. Errors as in `load_flux2`."""
    config = autoencoder_config(path, family)
    arrays = weights.load_component(
        path,
        config.shapes(),
        convert=key_maps.autoencoder_to_diffusers if key_maps.is_single_file(weights.read_keys(path)) else None,
        dtype=lambda key: mx.float32 if key.startswith("bn.") else dtype,
        ignore=lambda key: key == "bn.num_batches_tracked",
        arrange=autoencoder.arrange,
    )
    return autoencoder.Autoencoder(config, arrays)


def autoencoder_config(path: Path | None, family: Family) -> AutoencoderConfig:
    """From config.json. Without one, the decoder's widths come from the weights, if all are there, and the rest from `family`."""
    if path is None or read_config(path):
        return AutoencoderConfig.from_dict(component_config(path, family.autoencoder) if path else family.autoencoder)
    levels = len(family.autoencoder["block_out_channels"])
    shapes = {name: tensor["shape"] for file in weights.weight_files(path) for name, tensor in weights.read_header(file).items()}
    named = [
        (f"decoder.up.{i}.block.0.conv1.weight", f"decoder.up_blocks.{levels - 1 - i}.resnets.0.conv1.weight")
        for i in range(levels)
    ]
    found = [shapes[name][0] for pair in named for name in pair if name in shapes]
    widths = {"decoder_block_out_channels": tuple(found)} if len(found) == levels else {}
    return AutoencoderConfig.from_dict({**family.autoencoder, **widths})
