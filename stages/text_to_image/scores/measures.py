"""What pictures are compared by: the features of EfficientNet-Lite0, in data/assets/judges, and where they lie between two
groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from PIL import Image
from safetensors import safe_open

from stages.bundled import CHECKOUT, JUDGES
from stages.models.efficientnet import FEATURES, SIDE, EfficientNet
from stages.text_to_image.imaging.decode import open_image

IMAGE_WEIGHTS = CHECKOUT / JUDGES / "efficientnet-lite0.safetensors"
D = FEATURES  # numbers in the feature vector of an image


class ImageEncoder:
    """EfficientNet-Lite0. Images are encoded one at a time, so that the features of one do not depend on others."""

    def __init__(self, network: EfficientNet, source_sha256: str) -> None:
        self.network = network
        self.source_sha256 = source_sha256  # of the released file that the weights are from

    @classmethod
    def load(cls, file: Path = IMAGE_WEIGHTS) -> ImageEncoder:
        """Raises ValueError if `file`, which data/research/judges/convert.py writes, is damaged or holds another network."""
        network = EfficientNet.load(file)
        with safe_open(file, framework="numpy") as opened:
            return cls(network, (opened.metadata() or {}).get("source_sha256", ""))

    def encode(self, image: Image.Image) -> np.ndarray:
        """(1280,), float64, of length 1. The image is resized to a square, whatever its aspect ratio."""
        square = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        features_BD = self.network(mx.array(np.asarray(square, np.float32)[None]))
        feature_D = np.array(features_BD[0], np.float64)
        unit_D: np.ndarray = feature_D / np.linalg.norm(feature_D)
        return unit_D

    def encode_file(self, path: Path) -> np.ndarray:
        """`encode`. Raises ImageError if the file cannot be decoded."""
        return self.encode(open_image(path))


# The axis between two groups: the columns `style` and `real`

MIN_SIGNAL = 0.1  # share of the squared distance between two means that must be more than sampling noise


@dataclass(frozen=True)
class GroupMean:
    value: np.ndarray  # (features,)
    # The squared length of a mean of few images is too large on average, because their random differences do not cancel out.
    # This is an unbiased estimate for two or more images; for one, it is not corrected.
    squared_length: float


@dataclass(frozen=True)
class FeatureGroup:
    names: list[str]  # one per image, such as its prompt; images may share one
    features: np.ndarray  # (images, features)

    def mean(self, *, without: str | None = None) -> GroupMean | None:
        """Without the images named `without`; None if no image is left."""
        chosen_ND = self.features[[place for place, name in enumerate(self.names) if name != without]]
        count = len(chosen_ND)
        if not count:
            return None
        sum_D = chosen_ND.sum(axis=0)
        pairs = float(sum_D @ sum_D - (chosen_ND**2).sum())  # the products of two different images
        return GroupMean(sum_D / count, pairs / (count * (count - 1)) if count > 1 else float(sum_D @ sum_D))


def axis_position(feature_D: np.ndarray, start: GroupMean | None, end: GroupMean | None) -> float | None:
    """0 at `start`, 1 at `end`. None if a group has no images, or if the distance of the means is little more than
    sampling noise.
    """
    if start is None or end is None:
        return None
    axis_D = end.value - start.value
    dot = float(start.value @ end.value)
    # Not axis_D @ axis_D, which sampling noise makes too large.
    squared_length = start.squared_length + end.squared_length - 2 * dot
    if squared_length < MIN_SIGNAL * (axis_D @ axis_D):
        return None
    return (float(feature_D @ axis_D) - dot + start.squared_length) / squared_length
