"""Compose training pictures: a transparent sprite, resized, on a plain background. PyTorch only, on any device.

In names: B pictures, N sprites, 3 or 4 channels, H W pixels, S side of the sprite in the picture, 2 for (down, across).
"""

from __future__ import annotations

import json
import zipfile
from io import BytesIO
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

SIDE = 256  # side of every sprite, pixels

COLOURS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "black": (18, 18, 20),
    "grey": (150, 152, 156),
    "red": (214, 40, 48),
    "orange": (250, 140, 30),
    "yellow": (255, 218, 62),
    "green": (56, 158, 72),
    "blue": (44, 104, 216),
    "purple": (126, 66, 178),
    "pink": (248, 164, 200),
    "brown": (124, 80, 48),
    "teal": (16, 150, 150),
}

# resolution -> (height, width) of the buckets stage for the aspect ratios 1:1, 4:3, 3:4, 3:2 and 2:3.
SHAPES: dict[int, tuple[tuple[int, int], ...]] = {
    128: ((128, 128), (112, 144), (144, 112), (96, 160), (160, 96)),
    160: ((160, 160), (144, 176), (176, 144), (128, 192), (192, 128)),
    192: ((192, 192), (160, 224), (224, 160)),  # 4:3 and 3:2 are one shape here
}


def load_sprites(zip_path: str | Path, style: str) -> tuple[list[str], Tensor]:
    """Load all sprites of a style, "flat" or "3d". Return their names, sorted, and their pixels, uint8 RGBA (N,4,256,256),
    with alpha that is not premultiplied. Raises ValueError if the style is missing or a sprite has another size.
    """
    with zipfile.ZipFile(zip_path) as archive:
        found = {PurePosixPath(entry).stem: entry for entry in archive.namelist() if entry.startswith(f"{style}/")}
        if not found:
            raise ValueError(f'{zip_path} has no style "{style}"; concepts.py writes flat and 3d')
        names = sorted(found)
        sprites_N4HW = torch.empty(len(names), 4, SIDE, SIDE, dtype=torch.uint8)
        for n, name in enumerate(names):
            sprites_N4HW[n] = _decoded(archive.read(found[name]), f"{zip_path}: {found[name]}")
    return names, sprites_N4HW


def load_splits(zip_path: str | Path) -> dict[str, str]:
    """Return the split of every 3D sprite, by name. The autoencoder may see sprites of the split "base", but none of
    "example" and "held-out".
    """
    with zipfile.ZipFile(zip_path) as archive:
        splits: dict[str, str] = json.loads(archive.read("3d.json"))
    return splits


def _decoded(encoded: bytes, where: str) -> Tensor:
    image = Image.open(BytesIO(encoded)).convert("RGBA")
    if image.size != (SIDE, SIDE):
        raise ValueError(f"{where} must be {SIDE} x {SIDE} pixels, got {image.width} x {image.height}")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def compose(sprites_B4HW: Tensor, background_B3: Tensor, height: int, width: int, scale: float, shift_B2: Tensor) -> Tensor:
    """Draw each sprite on its background, and return float32 (B,3,height,width), -1 to 1. `sprites_B4HW` is uint8 RGBA.
    `background_B3` holds colours, 0 to 1. `scale` is the side of the sprite relative to the short side of the picture.
    `shift_B2` is how far the sprite is moved from the centre, in whole pixels (down, right).

    The part of a sprite outside the picture is cut off. The result is on the device of the sprites.
    """
    side = max(1, round(scale * min(height, width)))
    sprites_B4SS = _resized(sprites_B4HW, side)
    shift_B2 = shift_B2.to(sprites_B4SS.device)
    rows_BH = torch.arange(height, device=sprites_B4SS.device) - ((height - side) // 2 + shift_B2[:, :1])
    columns_BW = torch.arange(width, device=sprites_B4SS.device) - ((width - side) // 2 + shift_B2[:, 1:])
    layer_B4HW = _gathered(_gathered(sprites_B4SS, rows_BH, 2), columns_BW, 3)
    colour_B3HW, alpha_B1HW = layer_B4HW[:, :3], layer_B4HW[:, 3:]
    background_B311 = background_B3.to(sprites_B4SS.device, torch.float32)[:, :, None, None]
    return (colour_B3HW + (1 - alpha_B1HW) * background_B311) * 2 - 1


def _resized(sprites_B4HW: Tensor, side: int) -> Tensor:
    """Resize to side x side: float RGBA, 0 to 1, premultiplied so that hidden colours do not bleed into the edges."""
    straight_B4HW = sprites_B4HW.to(torch.float32) / 255
    alpha_B1HW = straight_B4HW[:, 3:]
    premultiplied_B4HW = torch.cat([straight_B4HW[:, :3] * alpha_B1HW, alpha_B1HW], dim=1)
    sprites_B4SS = functional.interpolate(premultiplied_B4HW, size=(side, side), mode="bicubic", antialias=True)
    alpha_B1SS = sprites_B4SS[:, 3:].clamp(0, 1)  # bicubic overshoots
    return torch.cat([torch.minimum(sprites_B4SS[:, :3].clamp(min=0), alpha_B1SS), alpha_B1SS], dim=1)


def _gathered(sprites: Tensor, at: Tensor, dim: int) -> Tensor:
    """Return some lines of each sprite along the axis `dim`. `at` holds the indices of the lines, (B,lines). Lines outside
    the sprite are transparent.
    """
    shape = [1, 1, 1, 1]
    shape[0], shape[dim] = at.shape
    at = at.reshape(shape)
    inside = (at >= 0) & (at < sprites.shape[dim])
    expanded = list(sprites.shape)
    expanded[dim] = at.shape[dim]
    return sprites.gather(dim, at.clamp(0, sprites.shape[dim] - 1).expand(expanded)) * inside
