"""Encode texts to token vectors, with the base encoder or with a trained adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from stages.models.retriever import RetrieverFamily
from stages.models.t5.encoder import T5
from stages.retrieval.adapter import read_adapter
from stages.retrieval.tokenizer import TextTokenizer
from stages.tuner.blockwise.forward import BlockwiseForward

MULTIPLE = 16  # texts are padded to a multiple of so many tokens: a GPU compiles one kernel per length


class Encoder:
    """An encoder of token ids with a projection head, with or without an adapter. `model` is the base encoder.
    `adapter` maps names to the arrays of the adapter. `scales` maps the name of each Linear to the factor of the
    adapter's change. Both are empty if there is no adapter. `tokenizer` turns texts into token ids; it is None if only
    token ids are encoded. `query_tokens` is the largest number of tokens of a query.
    """

    def __init__(
        self,
        model: T5,
        adapter: dict[str, mx.array],
        scales: dict[str, float],
        tokenizer: TextTokenizer | None,
        query_tokens: int,
    ) -> None:
        self.model, self.tokenizer, self.query_tokens = model, tokenizer, query_tokens
        self.forward = BlockwiseForward(model, adapter, scales, model.dtype)

    @property
    def width(self) -> int:
        """The number of values of a token vector."""
        return self.model.config.dimensions

    def encode_ids(self, many: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return one array of token vectors per text, float32 of shape `(tokens, width)`. Each vector has Euclidean
        length 1. `many` has one array of token ids per text.

        The texts are computed together, padded to the longest.
        """
        if not many:
            return []
        longest = max(-(-len(ids) // MULTIPLE) * MULTIPLE for ids in many)
        ids_BL = np.zeros((len(many), longest), np.int32)
        real_BL = np.zeros((len(many), longest), bool)
        for row, ids in enumerate(many):
            ids_BL[row, : len(ids)] = ids
            real_BL[row, : len(ids)] = True
        [vectors_BLE] = self.forward(ids=[mx.array(ids_BL)], real=[mx.array(real_BL)])
        found = np.array(vectors_BLE)
        return [found[row, : len(ids)] for row, ids in enumerate(many)]

    def query_ids(self, text: str) -> np.ndarray:
        """Return the token ids of the query `text` as an int32 array. If there are more than `query_tokens` ids (see
        `Encoder`), the array is cut to this number. The last id, the end token, is kept, and ids before it are removed.
        """
        assert self.tokenizer is not None, "this encoder has no tokenizer"
        [ids] = self.tokenizer.encode([text])
        return np.array(self.tokenizer.cut(ids, self.query_tokens), np.int32)

    def encode_queries(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode the queries `texts`. Return a list with one array of token vectors per query, float32 of shape
        `(tokens, width)`. Each vector has Euclidean length 1. Longer queries are cut to `query_tokens` tokens.
        """
        return self.encode_ids([self.query_ids(text) for text in texts])

    def tokens(self, text: str) -> list[str]:
        """Split a query into tokens, and return the text of each token. The query is cut to `query_tokens` tokens. The
        order is that of the query's token vectors (see `encode_queries`).
        """
        assert self.tokenizer is not None, "this encoder has no tokenizer"
        return self.tokenizer.pieces(self.query_ids(text).tolist())


def load_encoder(
    weights: Path,
    tokenizer: Path | None,
    family: RetrieverFamily,
    adapter: Path | None = None,
    *,
    precision: str = "float32",
    query_tokens: int = 32,
    strength: float = 1.0,
) -> Encoder:
    """Load a text encoder from the folder `weights`. `tokenizer` is the folder of the tokenizer, or None to encode only
    token ids. `family` describes the encoder's architecture. `adapter` is a trained adapter file, or None for the base
    model alone. `precision` is the dtype to compute in, "float32" or "bfloat16". Queries are cut to `query_tokens`
    tokens. `strength` is the share of the adapter's change that is used.
    Raises ValueError if a file is missing or damaged, or if the adapter belongs to another model.
    """
    model = family.architecture.load_encoder(weights, getattr(mx, precision), family.head_seed)
    arrays, scales = read_adapter(adapter, model.linears(), strength) if adapter else ({}, {})
    found = TextTokenizer(tokenizer, lower_case=family.lower_case) if tokenizer else None
    return Encoder(model, arrays, scales, found, query_tokens)
