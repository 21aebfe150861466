"""From latents to PNG files; also serves the Python API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from stages.models.family import Autoencoder


def decode(autoencoder: Autoencoder, latent_1Chw: mx.array) -> Image.Image:
    """An 8-bit RGB image. `latent_1Chw`: normalised, (1, channels, height / 16, width / 16)."""
    image_BHWC = mx.clip(mx.round((autoencoder.decode(latent_1Chw) + 1) * 127.5), 0, 255)
    return Image.fromarray(np.array(image_BHWC[0].astype(mx.uint8)))


def save_png(path: Path, image: Image.Image, metadata: Mapping[str, Any]) -> None:
    """`metadata` is stored as text chunks."""
    info = PngInfo()
    for key, value in metadata.items():
        info.add_itxt(key, str(value))
    image.save(path, format="PNG", pnginfo=info)
