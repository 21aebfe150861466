"""Text embeddings on disk, as bfloat16, or with 8 bits per value, which takes half the space.

With 8 bits, a row has one float32 scale per hidden state (its largest magnitude / 127), because hidden states and rows
differ in magnitude; the scales come first, then the values, two per word. T text rows, J text features, P stored words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np

from schemas.text_to_image import EMBEDDINGS
from stages.models.text.encoder import widen
from stages.run import Run, TensorReader

INT8 = "int8"  # value of the column dtype
SCALE_WORDS = 2  # 16-bit words of one scale
LEVELS = 127


def stored_words(features: int, states: int, dtype: str) -> int:
    """16-bit words that a row takes. `states`: hidden states that are joined to a row."""
    return features // 2 + SCALE_WORDS * states if dtype == INT8 else features


def pack(words_TJ: np.ndarray, states: int) -> np.ndarray:
    """bfloat16 as uint16 (T, J) -> uint16 (T, P)."""
    rows, features = words_TJ.shape
    values = widen(words_TJ).reshape(rows, states, features // states)
    scales = np.abs(values).max(2, keepdims=True) / np.float32(LEVELS)
    whole = np.rint(values / np.where(scales > 0, scales, 1)).astype(np.int8)
    parts = scales.reshape(rows, states).astype("<f4").view("<u2"), whole.reshape(rows, features).view("<u2")
    return np.concatenate(parts, axis=1)


def unpack(stored_TP: np.ndarray, states: int) -> np.ndarray:
    """The inverse of `pack`, rounded to the nearest bfloat16."""
    stored = np.ascontiguousarray(stored_TP)
    rows, at = len(stored), SCALE_WORDS * states
    scales = np.ascontiguousarray(stored[:, :at]).view("<f4").reshape(rows, states, 1)
    whole = np.ascontiguousarray(stored[:, at:]).view(np.int8).reshape(rows, states, -1)
    bits = (whole * scales).astype(np.float32).reshape(rows, -1).view(np.uint32)
    # Round half to even, on the bits: NumPy has no bfloat16.
    words_TJ: np.ndarray = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return words_TJ


class UnpackingReader:
    def __init__(self, stored: TensorReader, states: int) -> None:
        self.stored, self.states = stored, states

    def read(self, key: str, name: str = "") -> np.ndarray:
        return unpack(self.stored.read(key, name), self.states)

    def ahead(self, keys: Iterable[str]) -> None:
        self.stored.ahead(keys)


def embedding_reader(run: Run[Any]) -> TensorReader:
    """Reads embeddings as bfloat16 in uint16, (T, J), however they are stored."""
    reader, dtypes = run.inputs.tensors(EMBEDDINGS), run.inputs.rows(EMBEDDINGS)["dtype"]
    packed = len(dtypes) > 0 and dtypes[0].as_py() == INT8
    return UnpackingReader(reader, len(run.needs["family"].text_layers)) if packed else reader


def read_embedding(run: Run[Any], caption_id: str) -> mx.array:
    """(1, text tokens, features), bfloat16."""
    reader = embedding_reader(run)
    reader.ahead([caption_id])
    return mx.array(reader.read(caption_id)).view(mx.bfloat16)[None]
