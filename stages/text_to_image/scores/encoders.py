"""What turns images and texts into vectors: EfficientNet-Lite0 for images, a file of sentence embeddings for texts.

Both lie in data/judges, with their sources and licences; nothing is downloaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pyarrow as pa
from PIL import Image
from safetensors import safe_open

from stages.models.efficientnet import FEATURES, SIDE, EfficientNet
from stages.text_to_image.imaging.decode import open_image

JUDGES = Path(__file__).parents[3] / "data" / "judges"
IMAGE_WEIGHTS = JUDGES / "efficientnet-lite0.safetensors"
TEXT_VECTORS = JUDGES / "texts.arrow"
D = FEATURES  # numbers in the feature vector of an image


class ImageEncoder:
    """EfficientNet-Lite0. Images are encoded one at a time, so that the features of one do not depend on others."""

    def __init__(self, network: EfficientNet, source_sha256: str) -> None:
        self.network = network
        self.source_sha256 = source_sha256  # of the released file that the weights are from

    @classmethod
    def load(cls, file: Path = IMAGE_WEIGHTS) -> ImageEncoder:
        """Raises ValueError if `file`, which data/judges/convert.py writes, is damaged or holds another network."""
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


@dataclass(frozen=True)
class TextVectors:
    vectors: Mapping[str, np.ndarray]  # text -> float16 (384,)
    source_sha256: str  # of the weights that computed them

    @classmethod
    def load(cls, file: Path) -> TextVectors:
        """Read the Arrow file that data/judges/texts.py writes. Raises ValueError if it cannot be read or lacks a column."""
        try:
            with pa.memory_map(str(file)) as opened:
                table = pa.ipc.open_file(opened).read_all()
            vectors = np.array(table["vector"].to_pylist(), np.float16)
            about = table.schema.metadata or {}
            return cls(dict(zip(table["text"].to_pylist(), vectors, strict=True)), about[b"source_sha256"].decode())
        except (OSError, KeyError, pa.ArrowInvalid) as error:
            raise ValueError(f"{file} cannot be read as sentence embeddings: {error}") from None

    def missing(self, texts: Sequence[str]) -> list[str]:
        return [text for text in texts if text not in self.vectors]

    def stack(self, texts: Sequence[str]) -> np.ndarray:
        """(texts, 384), float64. Raises KeyError if a text has no embedding."""
        return np.stack([self.vectors[text] for text in texts]).astype(np.float64)

    def sha256(self, text: str) -> str:
        """Of the embedding of `text`, hex; "" if it has none."""
        return hashlib.sha256(self.vectors[text].tobytes()).hexdigest() if text in self.vectors else ""
