"""FLUX.2's latents: 32 channels in patches of 2 x 2 positions, normalised by the statistics of a batch norm."""

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
from stages.models.random_model import Component


@dataclass(frozen=True)
class AutoencoderConfig(autoencoder.AutoencoderConfig):
    model = "FLUX.2"

    batch_norm_eps: float = 1e-4

    def shapes(self) -> dict[str, tuple[int, ...]]:
        channels = (4 * self.latent_channels,)
        return super().shapes() | {"bn.running_mean": channels, "bn.running_var": channels}


class Autoencoder(autoencoder.Autoencoder):
    config: AutoencoderConfig

    def fold(self, z_BHWL: mx.array) -> mx.array:
        center_C, spread_C = self._statistics()
        return (patchify(z_BHWL) - center_C) / spread_C

    def unfold(self, latents_BChw: mx.array) -> mx.array:
        center_C, spread_C = self._statistics()
        return unpatchify(latents_BChw * spread_C + center_C)

    def _statistics(self) -> tuple[mx.array, mx.array]:
        mean_C = self.weights["bn.running_mean"].astype(mx.float32)
        var_C = self.weights["bn.running_var"].astype(mx.float32)
        return mean_C[:, None, None], mx.sqrt(var_C + self.config.batch_norm_eps)[:, None, None]


def patchify(z_BHWL: mx.array) -> mx.array:
    """(B, H, W, L) -> (B, 4 L, H / 2, W / 2); channel l at (row, column) of a patch becomes 4 l + 2 row + column."""
    B, H, W, L = z_BHWL.shape
    return z_BHWL.reshape(B, H // 2, 2, W // 2, 2, L).transpose(0, 5, 2, 4, 1, 3).reshape(B, 4 * L, H // 2, W // 2)


def unpatchify(z_BChw: mx.array) -> mx.array:
    B, C, h, w = z_BChw.shape
    return z_BChw.reshape(B, C // 4, 2, 2, h, w).transpose(0, 4, 2, 5, 3, 1).reshape(B, 2 * h, 2 * w, C // 4)


def load_autoencoder(path: Path, family: Family, dtype: Any = None) -> Autoencoder:
    """Weights in `dtype`, or as stored; the statistics of the latents always in float32. Errors as in `load_flux2`."""
    config = autoencoder_config(AutoencoderConfig, path, family)
    arrays = load_arrays(
        path,
        config,
        dtype=lambda key: mx.float32 if key.startswith("bn.") else dtype,
        ignore=lambda key: key == "bn.num_batches_tracked",
    )
    return Autoencoder(config, arrays)


def memory(path: Path | None, family: Family, *size: Any, **settings: Any) -> Memory:
    """See `Architecture.autoencoder_memory`."""
    return autoencoder_memory.autoencoder_memory(autoencoder_config(AutoencoderConfig, path, family), *size, **settings)


def is_autoencoder(shapes: Mapping[str, tuple[int, ...]], family: Family) -> bool:
    """Whether weights of these names and shapes are the family's autoencoder."""
    if "bn.running_mean" not in shapes or "encoder.conv_in.weight" not in shapes:
        return False
    sizes = family.autoencoder
    found = shapes["encoder.conv_in.weight"][0], shapes["bn.running_mean"]
    return found == (sizes["block_out_channels"][0], (4 * sizes["latent_channels"],))


def random_autoencoder(family: Family) -> Component:
    return {"_class_name": "AutoencoderKLFlux2", **family.autoencoder}, AutoencoderConfig.from_dict(family.autoencoder).shapes()
