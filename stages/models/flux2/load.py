"""From files to a model: which layout they have, and the sizes of the architecture.

Two layouts are known: a diffusers folder (transformer/, vae/, text_encoder/, tokenizer/) and the model makers' single
files (flux-2-klein-base-4b.safetensors, ae.safetensors) side by side in a folder. Both may be mixed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.models import weights
from stages.models.family import Family
from stages.models.flux2 import autoencoder
from stages.models.flux2 import key_maps as convert
from stages.models.flux2 import transformer as flux2
from stages.models.folders import component_config

sizes = component_config


def transformer_config(path: Path | None, family: Family) -> flux2.Flux2Config:
    """Read the transformer's sizes from the config.json at `path`; from the family's record if there is none, or no path.

    ValueError if the config is not that of a FLUX.2 transformer.
    """
    return flux2.Flux2Config.from_dict(component_config(path, family.transformer) if path else family.transformer)


def load_flux2(
    path: Path, family: Family, dtype: Any = None, arrange: Callable[[str, mx.array], Any] | None = None
) -> flux2.Flux2:
    """The transformer at `path`, either layout, every tensor cast to `dtype` (as stored, if None), then passed through `arrange`.

    One tensor is so held at a time: `arrange` may pack it.
    """
    config = transformer_config(path, family)
    foreign = convert.is_single_file(weights.read_keys(path))
    arrays = weights.load_component(
        path,
        config.shapes(),
        convert=(lambda found: convert.transformer(found, path)) if foreign else None,
        dtype=dtype,
        arrange=arrange,
    )
    return flux2.Flux2(config, arrays)


def load_autoencoder(path: Path, family: Family, dtype: Any = None) -> autoencoder.Autoencoder:
    """The autoencoder at `path`, either layout, cast to `dtype`; the statistics of its latents stay in float32."""
    config = autoencoder.AutoencoderConfig.from_dict(component_config(path, family.autoencoder))
    arrays = weights.load_component(
        path,
        config.shapes(),
        convert=convert.autoencoder if convert.is_single_file(weights.read_keys(path)) else None,
        dtype=lambda key: mx.float32 if key.startswith("bn.") else dtype,
        ignore=lambda key: key == "bn.num_batches_tracked",
        arrange=autoencoder.arrange,
    )
    return autoencoder.Autoencoder(config, arrays)
