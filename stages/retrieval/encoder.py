"""Encode texts to token vectors, with the base encoder or with a trained adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from stages.models.family import RetrieverFamily
from stages.models.t5.model import T5
from stages.retrieval.adapter import read_adapter
from stages.retrieval.tokenizer import TextTokenizer
from stages.tuner.blockwise.forward import BlockwiseForward

MULTIPLE = 16  # texts are padded to a multiple of so many tokens: a GPU compiles one kernel per length


class Encoder:
    """A base encoder with or without an adapter. Without `tokenizer`, it encodes token ids only."""

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
        return self.model.config.dimensions

    def encode_ids(self, many: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Float32 (tokens, width) per text, each vector of length 1. The texts are computed together, padded to the longest."""
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
        """Cut to `query_tokens` ids, of which the last is the end token."""
        assert self.tokenizer is not None, "this encoder has no tokenizer"
        [ids] = self.tokenizer.encode([text])
        return np.array(self.tokenizer.cut(ids, self.query_tokens), np.int32)

    def encode_queries(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Float32 (tokens, width) per query, each vector of length 1."""
        return self.encode_ids([self.query_ids(text) for text in texts])

    def tokens(self, text: str) -> list[str]:
        """The text of each token of a query, in the order of its vectors."""
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
    """`tokenizer` None: token ids only. `precision`: float32 or bfloat16. `strength`: share of the adapter's change.

    Raises ValueError if a file is missing or damaged, or the adapter belongs to another model.
    """
    model = family.architecture.load_encoder(weights, getattr(mx, precision), family.head_seed)
    arrays, scales = read_adapter(adapter, model.linears(), strength) if adapter else ({}, {})
    found = TextTokenizer(tokenizer, lower_case=family.lower_case) if tokenizer else None
    return Encoder(model, arrays, scales, found, query_tokens)
