"""Compute token vectors and MaxSim scores with MLX."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 64  # texts that are encoded together


def encode(family: Any, base: Path, adapter: Path | None, strength: float, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the token vectors of each text, float32 (tokens, width). `texts` holds token ids, one array per text. `family`
    is the model family of the encoder, and `base` the folder of its weights. `adapter` is an adapter file, or None for the
    base. `strength` is the factor of the adapter's change, 0 to 1.
    """
    import mlx.core as mx

    from stages.retrieval.encoder import Encoder, read_adapter

    mx.clear_cache()  # the memory of training, which other runs on the GPU may want
    model = family.architecture.load_encoder(base, mx.float32, family.head_seed)
    arrays, scales = read_adapter(adapter, model.linears(), strength) if adapter else ({}, {})
    encoder = Encoder(model, arrays, scales, None, 0)
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    found: list[np.ndarray] = [np.zeros(0)] * len(texts)
    for start in range(0, len(order), BATCH):
        some = order[start : start + BATCH]
        for n, vectors in zip(some, encoder.encode_ids([texts[n] for n in some]), strict=True):
            found[n] = vectors
    return found


def maxsim(queries: Sequence[np.ndarray], documents: Sequence[np.ndarray]) -> np.ndarray:
    """Return the MaxSim score of every document for every query, float32 (queries, documents). `queries` and `documents`
    list token vectors, one array (tokens, width) per text. The score is the mean, over the query's tokens, of the largest
    product with a token of the document.
    """
    import mlx.core as mx

    together_QE = mx.array(np.concatenate(queries))
    lengths = np.array([len(query) for query in queries])
    mean_BQ = np.repeat(np.eye(len(queries), dtype=np.float32) / lengths, lengths, axis=1)
    found = np.empty((len(queries), len(documents)), np.float32)
    order = sorted(range(len(documents)), key=lambda n: len(documents[n]))
    for start in range(0, len(order), BATCH):
        some = order[start : start + BATCH]
        longest = len(documents[some[-1]])
        padded = np.stack([np.resize(documents[n], (longest, documents[n].shape[1])) for n in some])  # repeats change no maximum
        products_QNK = (together_QE @ mx.array(padded).reshape(-1, padded.shape[-1]).T).reshape(-1, len(some), longest)
        found[:, some] = np.array(mx.array(mean_BQ) @ products_QNK.max(axis=-1))
    return found
