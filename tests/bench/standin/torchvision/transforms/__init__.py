"""Random crops and interpolation modes by torchvision's names."""

from __future__ import annotations

import random
from enum import Enum
from typing import Any


class InterpolationMode(Enum):
    BILINEAR = 2


class RandomCrop:
    @staticmethod
    def get_params(image: Any, output_size: tuple[int, int]) -> tuple[int, int, int, int]:
        """(top, left, height, width) of a random crop."""
        height, width = output_size
        return random.randint(0, image.height - height), random.randint(0, image.width - width), height, width
