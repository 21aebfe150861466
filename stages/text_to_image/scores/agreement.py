"""Whether an image shows what its text says: a linear map from image features to sentence embeddings, and cosines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

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
            raise ValueError(f"scores.map: {file} is not a map that agreement.py has written: {error}") from None

    def cosines(self, feature_D: np.ndarray, texts_NE: np.ndarray) -> np.ndarray:
        """The cosine of one image with each text, (texts,)."""
        predicted_E = ((feature_D - self.mean) / self.scale) @ self.weight
        centred_NE = texts_NE - self.text
        cosines_N: np.ndarray = centred_NE @ predicted_E / (np.linalg.norm(centred_NE, axis=1) * np.linalg.norm(predicted_E))
        return cosines_N
