"""Store text embeddings on disk in one of two forms: as bfloat16, or with 8 bits per value, which takes half the space.

With 8 bits, every text row has one float32 scale per hidden state, because hidden states and rows differ in magnitude. The
scale is the largest magnitude in that part of the row, divided by 127. T text rows, J text features, P stored words.
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
    """Return how many 16-bit words one row of an embedding takes on disk. `features` is the number of values in a row.
    `states` is the number of hidden states that a row consists of. `dtype` is "bfloat16" or "int8".
    """
    return features // 2 + SCALE_WORDS * states if dtype == INT8 else features


def pack(words_TJ: np.ndarray, states: int) -> np.ndarray:
    """Compress an embedding from bfloat16 to 8 bits per value, and return uint16 words, `(rows, words)`. `words_TJ` holds
    the bfloat16 values as uint16, `(rows, features)`. A row consists of `states` hidden states of equal width. In the
    result, a row has its scales first and then its values, two per word.
    """
    rows, features = words_TJ.shape
    values = widen(words_TJ).reshape(rows, states, features // states)
    scales = np.abs(values).max(2, keepdims=True) / np.float32(LEVELS)
    whole = np.rint(values / np.where(scales > 0, scales, 1)).astype(np.int8)
    parts = scales.reshape(rows, states).astype("<f4").view("<u2"), whole.reshape(rows, features).view("<u2")
    return np.concatenate(parts, axis=1)


def unpack(stored_TP: np.ndarray, states: int) -> np.ndarray:
    """Return the embedding that `pack` compressed, as a uint16 array `(rows, features)`. Each uint16 holds the 16 bits
    of one value in bfloat16. Values are rounded to the nearest bfloat16. `stored_TP` is the result of `pack`. `states`
    is the number of hidden states that a row of the embedding consists of, as in the call of `pack`.

    A row belongs to one token of a text. The text encoder has one hidden state (a vector) for this token after each
    layer. A row joins the hidden states after some of the layers. For example, a row with 3 hidden states of 2560
    values has 7680 features.
    """
    stored = np.ascontiguousarray(stored_TP)
    rows, at = len(stored), SCALE_WORDS * states
    scales = np.ascontiguousarray(stored[:, :at]).view("<f4").reshape(rows, states, 1)
    whole = np.ascontiguousarray(stored[:, at:]).view(np.int8).reshape(rows, states, -1)
    bits = (whole * scales).astype(np.float32).reshape(rows, -1).view(np.uint32)
    words_TJ: np.ndarray = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return words_TJ


class UnpackingReader:
    """A reader of a table `embeddings` that is stored with 8 bits per value. It returns bfloat16 values as uint16. `stored`
    is the reader of the table's tensors. `states` is the number of hidden states in an embedding.
    """

    def __init__(self, stored: TensorReader, states: int) -> None:
        self.stored, self.states = stored, states

    def read(self, key: str, name: str = "") -> np.ndarray:
        """Return the embedding of one text, bfloat16 values as uint16, `(rows, features)`. `key` is the text's
        caption_id. `name` is the column of the embedding; "" means the table's first one. Raises KeyError if the table
        has no such text.
        """
        return unpack(self.stored.read(key, name), self.states)

    def ahead(self, keys: Iterable[str]) -> None:
        """Start reading the embeddings of texts from disk. `keys` are their caption_ids."""
        self.stored.ahead(keys)


def embedding_reader(ctx: StageContext) -> TensorReader:
    """Return a reader of the embeddings in the table `embeddings`. `ctx` is the context of the stage that reads them.
    The reader's method `read` returns an embedding as bfloat16 values in a uint16 array, `(text rows, features)`. If
    the embeddings are stored with 8 bits per value, they are converted to bfloat16.
    """
    reader, dtypes = ctx.tensors(EMBEDDINGS), ctx.rows(EMBEDDINGS)["dtype"]
    packed = len(dtypes) > 0 and dtypes[0].as_py() == INT8
    return UnpackingReader(reader, len(ctx.need("family").text_layers)) if packed else reader
