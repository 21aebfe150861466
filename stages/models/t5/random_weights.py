"""Writes a random T5 retriever to test the pipeline. Equal words have equal vectors, so that its scores are no noise."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.t5.config import BIAS, EMBEDDING, HEAD, T5Config
from stages.models.t5.layout import write_model
from stages.models.text.tiny_tokenizer import write_json

SPECIAL = ("<pad>", "</s>", "<unk>")  # T5's ids 0, 1 and 2
GAIN = 0.5  # of the residual branches: the token itself stays visible in its state
LETTERS = [chr(code) for code in range(33, 127)]


def write_random_weights(folder: Path, family: Any, seed: int) -> None:
    """`family.sizes` is the content of config.json. Equal seeds give equal weights."""
    config = T5Config.from_dict(family.sizes, family.sizes.get("dimensions", 128))
    weights = {name: mx.array(_weight(name, shape, seed, config)) for name, shape in config.shapes().items()}
    write_model(folder, config, weights)
    write_tokenizer(folder, config.vocab_size)


def _weight(name: str, shape: tuple[int, ...], seed: int, config: T5Config) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    stream = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16], "little")
    raw = np.random.PCG64(stream).random_raw(int(np.prod(shape)))
    unit = ((raw >> np.uint64(40)).astype(np.float64) / 2**23 - 1).reshape(shape) * 3**0.5
    std = 1.0 if name in (EMBEDDING, BIAS, HEAD) else GAIN * shape[1] ** -0.5
    if ".q." in name:
        std *= config.d_kv**-0.5  # T5 has the root of the width in this weight
    return (unit * std).astype(np.float32)


def write_tokenizer(folder: Path, size: int) -> None:
    """Lower-cased words and numbers, split into characters and frequent pairs. 97 of at most `size` entries are no pairs."""
    pairs = [a + b for a in "etaoinshrdlu" for b in "etaoinshrdlucmfpgwybvk"]
    pieces = [*SPECIAL, *LETTERS, *pairs][:size]
    merges = [list(pair) for pair in pairs if pair in pieces]
    names = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": n, "content": token, **flags, "special": True} for n, token in enumerate(SPECIAL)]
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}]
    double = [*single, {"Sequence": {"id": "B", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}]
    special = {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": "Lowercase"},
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": r"\p{L}+|\p{N}+"}, "behavior": "Removed", "invert": True},
                ],
            },
            "post_processor": {"type": "TemplateProcessing", "single": single, "pair": double, "special_tokens": special},
            "decoder": None,
            "model": {
                "type": "BPE",
                "unk_token": "<unk>",
                "vocab": {piece: n for n, piece in enumerate(pieces)},
                "merges": merges,
            },
        },
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "model_max_length": 512}
    write_json(folder / "tokenizer_config.json", settings)
