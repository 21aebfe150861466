"""Encode texts to token vectors, with the base encoder or with a trained adapter; read adapters and merge them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models import adapters
from stages.models.family import RetrieverFamily
from stages.models.t5.model import T5
from stages.models.weights import read_file
from stages.run import Run, TensorReader
from stages.tuner.adapters import lora
from stages.tuner.adapters.lora import check_fits, merge
from stages.tuner.blockwise.backprop import BlockwiseForward
from stages.untrusted import parse_json, read_json


class TextTokenizer:
    """Raises ValueError if tokenizer.json is missing or cannot be read."""

    def __init__(self, folder: Path, *, lower_case: bool) -> None:
        from tokenizers import Tokenizer

        self.lower_case = lower_case
        file, config = folder / "tokenizer.json" if folder.is_dir() else folder, folder / "tokenizer_config.json"
        if not file.is_file():
            raise ValueError(f"{file} is missing: a retriever needs a tokenizer.json")
        try:
            self.tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001  (the library raises Exception itself)
            raise ValueError(f"{file} is not a tokenizer.json: {error}") from None
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        named = read_json(config) if config.is_file() else {}
        if not isinstance(named, dict):
            raise ValueError(f"{config} is no tokenizer_config.json")
        tokens = [named.get("eos_token") or "</s>", named.get("unk_token") or "<unk>"]
        self.end, self.unknown = (
            self.tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token) for token in tokens
        )

    def encode(self, many: list[str]) -> list[list[int]]:
        """Each list ends with the end token, if there is one. Nothing is cut."""
        found = self.tokenizer.encode_batch([text.lower() for text in many] if self.lower_case else many)
        ids = [each.ids for each in found]
        return [each if self.end is None or (each and each[-1] == self.end) else [*each, self.end] for each in ids]

    def cut(self, ids: list[int], longest: int) -> list[int]:
        """Keeps the last id, the end token."""
        return ids if len(ids) <= longest else [*ids[: longest - 1], ids[-1]]

    def pieces(self, ids: list[int]) -> list[str]:
        """For display; "<7>" for an id without a text."""
        return [self.tokenizer.id_to_token(each) or f"<{each}>" for each in ids]


Arrays = dict[str, mx.array]


def read_adapter(path: Path, linears: Mapping[str, tuple[int, int]], strength: float = 1.0) -> tuple[Arrays, dict[str, float]]:
    """(float32 arrays, scale of each Linear x `strength`). `linears`: (outputs, inputs). Raises ValueError if it does not fit."""
    arrays, metadata = read_file(path)
    arrays = {name: value.astype(mx.float32) for name, value in arrays.items()}
    whole = [name.removesuffix(lora.DIFF) for name in arrays if name.endswith(lora.DIFF)]
    try:
        low = adapters.linears({name: value for name, value in arrays.items() if not name.endswith(lora.DIFF)})
        scales = dict.fromkeys(whole, 1.0) | _scales(metadata, arrays, low)
        if missing := [name for name in parse_json(metadata.get("linears", "[]"), "linears") if name not in scales]:
            raise ValueError(f"the file lacks the arrays of {missing[0]} ({len(missing)} of its Linears); fetch it again")
        check_fits(linears, arrays, scales)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
    if name := adapters.first_not_finite(arrays):
        raise ValueError(f"{path}: {name} holds values that are not finite; choose an earlier checkpoint")
    if strength != 1 and any(name.endswith(lora.MAGNITUDE) for name in arrays):
        raise ValueError(f"vectors.strength must be 1 for an adapter with DoRA, got {strength:g}: its change has no scale")
    return arrays, {name: strength * scale for name, scale in scales.items()}


def _scales(metadata: Mapping[str, str], arrays: Arrays, linears: list[str]) -> dict[str, float]:
    """From "scales" of the header, or alpha / rank; 1 for a Linear without a rank."""
    if "scales" in metadata:
        listed = parse_json(metadata["scales"], "scales")
        return {name: float(listed[name]) for name in linears}
    if "alpha" not in metadata:
        raise ValueError("the header has no alpha: is it an adapter that this program trained?")
    ranks = adapters.ranks(arrays)
    return {name: float(metadata["alpha"]) / ranks[name] if name in ranks else 1.0 for name in linears}


def merge_all(weights: Mapping[str, mx.array], arrays: Arrays, scales: Mapping[str, float]) -> Arrays:
    """All weights of the encoder in float32, with the adapter merged in."""
    merged: Arrays = {}
    done = set()
    for key, weight in weights.items():
        name = key.removesuffix(".weight")
        wide = weight.astype(mx.float32)
        if name in scales:
            wide = merge(wide, lora.arrays_of_linear(arrays, name), scales[name])
            done.add(name)
        merged[key] = wide
    # Another program merged 14 of 24 Linears in silence, since B came before A in its file.
    assert done == set(scales), f"{len(scales) - len(done)} of {len(scales)} Linears were not merged"
    return merged


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

    def encode_ids(self, many: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Float32 (tokens, width) per text, each vector of length 1. The texts are computed together, padded to the longest."""
        if not many:
            return []
        ids_BL, real_BL = padded(many, MULTIPLE)
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


def padded(many: Sequence[np.ndarray], step: int) -> tuple[np.ndarray, np.ndarray]:
    """Int32 ids padded with 0, and the mask, False for padding: (sequences, longest rounded up to `step`)."""
    length = -(-max(len(ids) for ids in many) // step) * step
    ids_NL, real_NL = np.zeros((len(many), length), np.int32), np.zeros((len(many), length), bool)
    for row, ids in enumerate(many):
        ids_NL[row, : len(ids)] = ids
        real_NL[row, : len(ids)] = True
    return ids_NL, real_NL


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
    """`tokenizer` None: token ids only. `strength`: share of the adapter's change. Raises ValueError if a file does not fit."""
    model = family.architecture.load_encoder(weights, getattr(mx, precision), family.head_seed)
    arrays, scales = read_adapter(adapter, model.linears(), strength) if adapter else ({}, {})
    found = TextTokenizer(tokenizer, lower_case=family.lower_case) if tokenizer else None
    return Encoder(model, arrays, scales, found, query_tokens)


@contextmanager
def text_encoder(
    run: Run[Any], tokens: TensorReader, adapter: Path | None, *, precision: str = "float32", strength: float = 1.0
) -> Iterator[Callable[[str], np.ndarray]]:
    """text_id -> its vectors. The weights are in memory within the block only."""
    weights, family = run.needs["encoder"], run.needs["family"]
    held = [load_encoder(weights, None, family, adapter, precision=precision, strength=strength)]
    try:
        # One text at a time, so that no row depends on another.
        yield lambda text_id: held[0].encode_ids([tokens.read(text_id)])[0]
    finally:
        held.clear()  # the function may outlive this
        gc.collect()
        mx.clear_cache()
