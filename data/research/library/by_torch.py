"""Compute token vectors and MaxSim scores with PyTorch. On a Linux CPU it takes about half as long as MLX."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

TEXTS = 32  # texts that are encoded together
DOCUMENTS = 64  # documents that are scored together
TOKENS = 4096  # query tokens that are scored together


def encode(family: Any, base: Path, adapter: Path | None, strength: float, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the token vectors of each text, float32 (tokens, width), each vector of length 1. `texts` holds token ids, one
    array per text. `family` is the model family of the encoder, and `base` the folder of its weights. `adapter` is an
    adapter file, or None for the base. `strength` is the factor of the adapter's change, which is merged into the weights.
    The encoder is the class T5EncoderModel of transformers.
    """
    import torch
    from safetensors.torch import load_file
    from transformers import T5EncoderModel

    with tempfile.TemporaryDirectory() as work:
        folder = _write(family, base, adapter, strength, Path(work))
        model: Any = T5EncoderModel.from_pretrained(folder).eval()
        head_ED = load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"]
    found: list[np.ndarray] = [np.zeros(0)] * len(texts)
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    for start in range(0, len(order), TEXTS):
        some = order[start : start + TEXTS]
        ids_BL, real_BL = np.zeros((2, len(some), len(texts[some[-1]])), np.int64)
        for row, n in enumerate(some):
            ids_BL[row, : len(texts[n])], real_BL[row, : len(texts[n])] = texts[n], 1
        with torch.no_grad():
            hidden_BLD = model(torch.from_numpy(ids_BL), attention_mask=torch.from_numpy(real_BL)).last_hidden_state
            vectors_BLE = torch.nn.functional.normalize(hidden_BLD @ head_ED.T, dim=-1).numpy()
        for row, n in enumerate(some):
            found[n] = vectors_BLE[row, : len(texts[n])].copy()
    return found


def _write(family: Any, base: Path, adapter: Path | None, strength: float, folder: Path) -> Path:
    """Write an encoder with an adapter merged into it as a folder that transformers loads, and return the folder. `folder`
    is where the result lies. The other arguments are those of `encode`.
    """
    import mlx.core as mx

    from stages.retrieval.encoder import merge_all, read_adapter

    architecture = family.architecture
    sizes = architecture.sizes(base)
    weights = architecture.load_weights(base, sizes, mx.float32, family.head_seed)
    linears = architecture.build_encoder(sizes, weights).linears()
    arrays, scales = read_adapter(adapter, linears, strength) if adapter else ({}, {})
    architecture.write_model(folder, sizes, merge_all(weights, arrays, scales))
    return folder


def maxsim(queries: Sequence[np.ndarray], documents: Sequence[np.ndarray]) -> np.ndarray:
    """Return the MaxSim score of every document for every query, float32 (queries, documents). `queries` and `documents`
    list token vectors, one array (tokens, width) per text. The score is the mean, over the query's tokens, of the largest
    product with a token of the document.
    """
    import torch

    together_QE = torch.from_numpy(np.concatenate(queries))
    lengths = np.array([len(query) for query in queries])
    firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    found = np.empty((len(queries), len(documents)), np.float32)
    order = sorted(range(len(documents)), key=lambda n: len(documents[n]))
    for start in range(0, len(order), DOCUMENTS):
        some = order[start : start + DOCUMENTS]
        longest, width = documents[some[-1]].shape
        padded = np.stack([np.resize(documents[n], (longest, width)) for n in some])  # repeats change no maximum
        tokens_EK = torch.from_numpy(padded).reshape(-1, width).T
        best = [(part @ tokens_EK).reshape(-1, len(some), longest).amax(-1).numpy() for part in together_QE.split(TOKENS)]
        found[:, some] = np.add.reduceat(np.concatenate(best), firsts, axis=0) / lengths[:, None]
    return found
