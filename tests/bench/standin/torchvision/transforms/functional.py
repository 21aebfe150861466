"""Operations on Pillow images by torchvision's names."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image


def resize(image: Any, size: list[int], interpolation: Any) -> Any:
    """`size`: [height, width] in pixels."""
    return image.resize((size[1], size[0]), interpolation.value)


def crop(image: Any, top: int, left: int, height: int, width: int) -> Any:
    return image.crop((left, top, left + width, top + height))


def center_crop(image: Any, size: tuple[int, int]) -> Any:
    height, width = size
    return crop(image, round((image.height - height) / 2), round((image.width - width) / 2), height, width)


def hflip(image: Any) -> Any:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def to_tensor(image: Any) -> Any:
    """float32 (channels, height, width), 0 to 1."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def normalize(x: Any, mean: list[float], std: list[float]) -> Any:
    """One mean and one standard deviation for all channels."""
    return (x - mean[0]) / std[0]
