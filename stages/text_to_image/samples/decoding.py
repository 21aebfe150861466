"""From latents to PNG files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from stages.models.protocols import Autoencoder


def decode(autoencoder: Autoencoder, latent_1Chw: mx.array) -> Image.Image:
    """Decode one latent with the autoencoder, and return an RGB image with 8 bits per channel. `latent_1Chw` is the
    normalised latent, `(1, channels, height / 16, width / 16)`. `height` and `width` are those of the image in pixels.
    """
    image_BHWC = mx.clip(mx.round((autoencoder.decode(latent_1Chw) + 1) * 127.5), 0, 255)
    return Image.fromarray(np.array(image_BHWC[0].astype(mx.uint8)))


def save_png(path: Path, image: Image.Image, metadata: Mapping[str, Any]) -> None:
    """Write an image as a PNG file at `path`. `metadata` maps names to values. They are stored in the file as text
    chunks.
    """
    info = PngInfo()
    for key, value in metadata.items():
        info.add_itxt(key, str(value))
    image.save(path, format="PNG", pnginfo=info)
