"""Whether an image shows what its text says: a linear map from image features to sentence embeddings, and cosines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

ARRAYS = ("mean", "scale", "weight", "text")


@dataclass(frozen=True)
class AgreementMap:
    """A linear map from the features of an image to the sentence embedding of its caption, fitted by ridge regression.
    A prediction is `((features - mean) / scale) @ weight`. It estimates the caption's sentence embedding minus `text`.
    `text` is the mean sentence embedding of the captions used for the fit. The map is valid only for the image encoder
    and the text encoder with which it was fitted. `images_sha256` and `texts_sha256` are the hashes of the weights of
    these encoders.

    `mean` and `scale` have the shape `(features,)`, `weight` has the shape `(features, embedding)`, and `text` has the
    shape `(embedding,)`.
    """

    mean: np.ndarray
    scale: np.ndarray
    weight: np.ndarray
    text: np.ndarray
    images_sha256: str
    texts_sha256: str

    @classmethod
    def load(cls, file: Path) -> AgreementMap:
        """Read an agreement map (from image features to caption embeddings) from the safetensors file `file`. Raises
        ValueError if the file is missing or is not such a map.

        data/micro/training/agreement.py writes such files.
        """
        try:
            with safe_open(file, framework="numpy") as opened:
                arrays = {name: opened.get_tensor(name).astype(np.float64) for name in ARRAYS}
                about = opened.metadata() or {}
            return cls(**arrays, images_sha256=about["images_sha256"], texts_sha256=about["texts_sha256"])
        except (OSError, KeyError, SafetensorError) as error:
            raise ValueError(f"scores.map: {file} is not a map that agreement.py has written: {error}") from None

    def cosines(self, feature_D: np.ndarray, texts_NE: np.ndarray) -> np.ndarray:
        """Return the cosine similarity of one image with each text, as an array (texts,). `feature_D` holds the
        features of the image, (features,). This `AgreementMap` predicts a sentence embedding from these features. The
        prediction is then compared with the embedding of each text. `texts_NE` holds one sentence embedding per text,
        (texts, embedding).

        The mean embedding `text` is first subtracted from the embeddings of the texts.
        """
        predicted_E = ((feature_D - self.mean) / self.scale) @ self.weight
        centred_NE = texts_NE - self.text
        cosines_N: np.ndarray = centred_NE @ predicted_E / (np.linalg.norm(centred_NE, axis=1) * np.linalg.norm(predicted_E))
        return cosines_N
