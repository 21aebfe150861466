"""Whether a picture shows what its text says: a linear map from image features to sentence embeddings, and cosines.

The map works only for the sentences of data/projects/example: data/research/micro/agreement.py fits it,
data/research/judges/texts.py stores the
sentence embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from safetensors import SafetensorError, safe_open

from data import ASSETS
from stages.text_to_image.scores import ImageEncoder, without_trigger

TEXT_VECTORS = ASSETS / "judges" / "texts.arrow"
MAP = Path(__file__).with_name("agreement.safetensors")
ARRAYS = ("mean", "scale", "weight", "text")


@dataclass(frozen=True)
class AgreementMap:
    """Ridge regression from image features to the caption's sentence embedding less `text`. Valid only for its own encoders."""

    mean: np.ndarray  # (features,)
    scale: np.ndarray  # (features,)
    weight: np.ndarray  # (features, embedding)
    text: np.ndarray  # (embedding,): mean sentence embedding of the captions of the fit
    images_sha256: str  # of the weights of the image encoder
    texts_sha256: str  # of the weights of the text encoder

    @classmethod
    def load(cls, file: Path) -> AgreementMap:
        """Raises ValueError if the file is missing or is no such map."""
        try:
            with safe_open(file, framework="numpy") as opened:
                arrays = {name: opened.get_tensor(name).astype(np.float64) for name in ARRAYS}
                about = opened.metadata() or {}
            return cls(**arrays, images_sha256=about["images_sha256"], texts_sha256=about["texts_sha256"])
        except (OSError, KeyError, SafetensorError) as error:
            raise ValueError(f"{file} is not a map that data/research/micro/agreement.py has written: {error}") from None

    def cosines(self, feature_D: np.ndarray, texts_NE: np.ndarray) -> np.ndarray:
        """The cosine of one image with each text, (texts,)."""
        predicted_E = ((feature_D - self.mean) / self.scale) @ self.weight
        centred_NE = texts_NE - self.text
        cosines_N: np.ndarray = centred_NE @ predicted_E / (np.linalg.norm(centred_NE, axis=1) * np.linalg.norm(predicted_E))
        return cosines_N


@dataclass(frozen=True)
class TextVectors:
    vectors: Mapping[str, np.ndarray]  # text -> float16 (384,)
    source_sha256: str  # of the weights that computed them

    @classmethod
    def load(cls, file: Path) -> TextVectors:
        """Read the Arrow file that data/research/judges/texts.py writes. Raises ValueError if it cannot be read or lacks a
        column.
        """
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


class Agreement:
    """Measures pictures against the distinct `texts`. Raises ValueError if the map was fitted to other encoders."""

    def __init__(
        self,
        texts: Sequence[str],
        encoder: ImageEncoder | None = None,
        embed: Callable[[Sequence[str]], np.ndarray] | None = None,
        file: Path = MAP,
    ) -> None:
        """`embed(texts)`: sentence embeddings (texts, 384); by default those that are stored."""
        vectors = TextVectors.load(TEXT_VECTORS)
        self.encoder, self.map = encoder or ImageEncoder.load(), AgreementMap.load(file)
        if (self.map.images_sha256, self.map.texts_sha256) != (self.encoder.source_sha256, vectors.source_sha256):
            raise ValueError(f"{file} was fitted to other encoders than those in data/assets/judges; fit it again")
        self.texts = sorted(set(texts))
        self.texts_NE = (embed or vectors.stack)(self.texts)

    def score(self, feature_D: np.ndarray, text: str) -> dict[str, Any]:
        """agreement: the cosine of the picture with its text; agreement_rank: the place of its text among all, 1 the best."""
        cosines_N = self.map.cosines(feature_D, self.texts_NE)
        own = cosines_N[self.texts.index(text)]
        return {"agreement": float(own), "agreement_rank": 1 + int((cosines_N > own).sum())}


def with_agreement(
    rows: Sequence[Mapping[str, Any]], previews: Path, real: Path, trigger: str, **given: Any
) -> list[dict[str, Any]]:
    """Rows of the table `scores` with the columns agreement and agreement_rank. `previews`, `real`: folders of their pictures.
    `given`: of `Agreement`.
    """
    texts = [without_trigger(row["prompt"], trigger) for row in rows]
    agreement = Agreement(texts, **given)
    found = []
    for row, text in zip(rows, texts, strict=True):
        feature_D = agreement.encoder.encode_file((real if row["kind"] == "real" else previews) / row["path"])
        found.append({**row, **agreement.score(feature_D, text)})
    return found
