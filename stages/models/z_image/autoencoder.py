"""Z-Image's latents: FLUX.1's 16 channels, moved and scaled to about mean 0 and variance 1, in patches of 2 x 2 positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.memory import Memory
from stages.models import autoencoder, autoencoder_memory
from stages.models.autoencoder_files import autoencoder_config, load_arrays
from stages.models.family import Family


@dataclass(frozen=True)
class AutoencoderConfig(autoencoder.AutoencoderConfig):
    model = "Z-Image"

    scaling_factor: float = 0.3611
    shift_factor: float = 0.1159


class Autoencoder(autoencoder.Autoencoder):
    config: AutoencoderConfig

    def fold(self, z_BHWL: mx.array) -> mx.array:
        return patchify((z_BHWL - self.config.shift_factor) * self.config.scaling_factor)

    def unfold(self, latents_BChw: mx.array) -> mx.array:
        return unpatchify(latents_BChw) / self.config.scaling_factor + self.config.shift_factor


def patchify(z_BHWL: mx.array) -> mx.array:
    """(B, H, W, L) -> (B, 4 L, H / 2, W / 2); channel l at (row, column) of a patch becomes (2 row + column) L + l."""
    B, H, W, L = z_BHWL.shape
    return z_BHWL.reshape(B, H // 2, 2, W // 2, 2, L).transpose(0, 2, 4, 5, 1, 3).reshape(B, 4 * L, H // 2, W // 2)


def unpatchify(z_BChw: mx.array) -> mx.array:
    B, C, h, w = z_BChw.shape
    return z_BChw.reshape(B, 2, 2, C // 4, h, w).transpose(0, 4, 1, 5, 2, 3).reshape(B, 2 * h, 2 * w, C // 4)


def load_autoencoder(path: Path, family: Family, dtype: Any = None) -> Autoencoder:
    """Weights in `dtype`, or as stored. Raises ValueError if one is missing, unknown, damaged or of another shape."""
    config = autoencoder_config(AutoencoderConfig, path, family)
    return Autoencoder(config, load_arrays(path, config, dtype=dtype))


def memory(path: Path | None, family: Family, *size: Any, **settings: Any) -> Memory:
    """See `Architecture.autoencoder_memory`."""
    return autoencoder_memory.autoencoder_memory(autoencoder_config(AutoencoderConfig, path, family), *size, **settings)


def is_autoencoder(shapes: Mapping[str, tuple[int, ...]], family: Family) -> bool:
    # FLUX.1's has no statistics, and no convolution beside encoder and decoder.
    if any("quant_conv" in name or name.startswith("bn.") for name in shapes):
        return False
    first, latent = shapes.get("encoder.conv_in.weight", (0,))[0], shapes.get("decoder.conv_in.weight", (0, 0))[1]
    return (first, latent) == (family.autoencoder["block_out_channels"][0], family.autoencoder["latent_channels"])
