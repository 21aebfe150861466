"""Embeddings on disk: bfloat16 as the text encoder gives them, or 8 bits a value, which take half the space.

With 8 bits, each row has a float32 scale for each hidden state: the largest magnitude of the hidden state in this row, divided
by 127. The hidden states of an embedding differ in size, and so do its rows. T text rows, J text features, P stored words.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from schemas.text_to_image.embeddings import EMBEDDINGS
from stages.models.text.encoder import widen
from stages.stage import StageContext, TensorReader

INT8 = "int8"  # value of the column dtype
SCALE_WORDS = 2  # 16-bit words of one scale
LEVELS = 127


def stored_words(features: int, states: int, dtype: str) -> int:
    """Return how many 16-bit words one row of an embedding takes on disk. `features` is the number of values of a row, in
    `states` hidden states. `dtype` is "bfloat16" or "int8".
    """
    return features // 2 + SCALE_WORDS * states if dtype == INT8 else features


def pack(words_TJ: np.ndarray, states: int) -> np.ndarray:
    """Return an embedding with 8 bits a value, as uint16 words `(rows, words)`. `words_TJ` holds bfloat16 values as uint16
    words. A row consists of `states` hidden states of equal width. The words of a row are first its scales and then its
    values, two in a word.
    """
    rows, features = words_TJ.shape
    values = widen(words_TJ).reshape(rows, states, features // states)
    scales = np.abs(values).max(2, keepdims=True) / np.float32(LEVELS)
    whole = np.rint(values / np.where(scales > 0, scales, 1)).astype(np.int8)
    parts = scales.reshape(rows, states).astype("<f4").view("<u2"), whole.reshape(rows, features).view("<u2")
    return np.concatenate(parts, axis=1)


def unpack(stored_TP: np.ndarray, states: int) -> np.ndarray:
    """Return the embedding that `pack` has stored, as bfloat16 values in uint16 words, `(rows, features)`. Values are
    rounded to the nearest bfloat16.
    """
    stored = np.ascontiguousarray(stored_TP)
    rows, at = len(stored), SCALE_WORDS * states
    scales = np.ascontiguousarray(stored[:, :at]).view("<f4").reshape(rows, states, 1)
    whole = np.ascontiguousarray(stored[:, at:]).view(np.int8).reshape(rows, states, -1)
    bits = (whole * scales).astype(np.float32).reshape(rows, -1).view(np.uint32)
    words_TJ: np.ndarray = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return words_TJ


class UnpackingReader:
    """A reader of a table `embeddings` with 8 bits a value. `read` returns bfloat16 values as uint16 words. `stored` reads
    the table's tensors, and `states` is the number of hidden states of an embedding.
    """

    def __init__(self, stored: TensorReader, states: int) -> None:
        self.stored, self.states = stored, states

    def read(self, key: str, name: str = "") -> np.ndarray:
        """Return the embedding of the text with the `caption_id` `key`. KeyError if there is none."""
        return unpack(self.stored.read(key, name), self.states)

    def ahead(self, keys: Iterable[str]) -> None:
        """Start reading the embeddings of texts from disk. `keys` are their caption_ids."""
        self.stored.ahead(keys)


def embedding_reader(ctx: StageContext) -> TensorReader:
    """Open the table `embeddings` that the stage `ctx` reads. The reader returns bfloat16 values as uint16 words, `(text
    rows, features)`, in whichever form they are stored.
    """
    reader, dtypes = ctx.tensors(EMBEDDINGS), ctx.rows(EMBEDDINGS)["dtype"]
    packed = len(dtypes) > 0 and dtypes[0].as_py() == INT8
    return UnpackingReader(reader, len(ctx.need("family").text_layers)) if packed else reader
