"""Encode texts to token vectors, with the base encoder or with a trained adapter; read adapters and merge them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from stages.models import adapters
from stages.models.family import Reading, RetrieverFamily
from stages.models.folders import open_tokenizer, read_object
from stages.models.t5.model import T5
from stages.models.weights import read_file
from stages.retrieval.texts import Role
from stages.run import Run, TensorReader
from stages.tuner.adapters import lora
from stages.tuner.adapters.lora import check_fits, merge
from stages.tuner.blockwise.backprop import BlockwiseForward
from stages.untrusted import parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def unknown_of(tokenizer: Tokenizer) -> int | None:
    """The unknown token of the tokenizer itself, whose kinds say it in two ways."""
    if hasattr(tokenizer.model, "unk_token"):
        return tokenizer.token_to_id(tokenizer.model.unk_token) if tokenizer.model.unk_token else None
    found: int | None = parse_json(tokenizer.to_str(), "tokenizer.json")["model"].get("unk_id")
    return found


class TextTokenizer:
    """Raises ValueError if tokenizer.json is missing or cannot be read."""

    def __init__(self, folder: Path, *, lower_case: bool, reading: Reading | None = None) -> None:
        self.lower_case, self.reading = lower_case, reading or Reading()
        file, config = folder / "tokenizer.json" if folder.is_dir() else folder, folder / "tokenizer_config.json"
        self.tokenizer = open_tokenizer(file)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        named = read_object(config)
        tokens = [named.get("eos_token") or "</s>", named.get("unk_token") or "<unk>"]
        self.end, self.unknown = (
            self.tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token) for token in tokens
        )
        if not self.reading.special:
            self.unknown = unknown_of(self.tokenizer)
        self.end = self.end if self.reading.end else None

    def encode(self, many: list[str]) -> list[list[int]]:
        """Each list ends with the end token, if there is one. Nothing is cut."""
        special = self.reading.special
        many = [text.lower() for text in many] if self.lower_case else many
        found = self.tokenizer.encode_batch(many, add_special_tokens=special)
        ids = [each.ids for each in found]
        if not special:
            # A text of unknown words alone keeps one.
            ids = [[each for each in some if each != self.unknown] or some[:1] or [0] for some in ids]
        return [each if self.end is None or (each and each[-1] == self.end) else [*each, self.end] for each in ids]

    def cut(self, ids: list[int], longest: int, role: Role = "document") -> list[int]:
        """Keeps the last id, the end token, if texts end with one; with the prefix of the role, and expanded."""
        reading = self.reading
        prefix = reading.query if role == "query" else reading.document
        longest -= prefix is not None
        ids = ids if len(ids) <= longest else [*ids[: longest - 1], ids[-1]] if reading.special else ids[:longest]
        ids = ids if prefix is None else [ids[0], prefix, *ids[1:]]
        if role == "query" and reading.expansion is not None:
            ids = [*ids, *[reading.expansion] * (longest + (prefix is not None) - len(ids))]
        return ids

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
        reading: Reading | None = None,
    ) -> None:
        self.model, self.tokenizer, self.query_tokens = model, tokenizer, query_tokens
        self.reading = reading or Reading()
        self.skipped = np.array(sorted(self.reading.skipped), np.int32)
        self.forward = BlockwiseForward(model, adapter, scales, model.dtype)

    def encode_ids(self, many: Sequence[np.ndarray], role: Role = "document") -> list[np.ndarray]:
        """Float32 (tokens, width) per text, each vector of length 1. The texts are computed together, padded to the longest."""
        if not many:
            return []
        ids_BL, real_BL = padded(many, MULTIPLE)
        if role == "query" and not self.reading.attended:
            real_BL &= ids_BL != self.reading.expansion
        [vectors_BLE] = self.forward(ids=[mx.array(ids_BL)], real=[mx.array(real_BL)])
        found = np.array(vectors_BLE)
        vectors = [found[row, : len(ids)] for row, ids in enumerate(many)]
        if role == "query" or not len(self.skipped):
            return vectors
        return [each[~np.isin(ids, self.skipped)] for each, ids in zip(vectors, many, strict=True)]

    def query_ids(self, text: str) -> np.ndarray:
        """Cut to `query_tokens` ids, of which the last is the end token."""
        assert self.tokenizer is not None, "this encoder has no tokenizer"
        [ids] = self.tokenizer.encode([text])
        return np.array(self.tokenizer.cut(ids, self.query_tokens, "query"), np.int32)

    def encode_queries(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Float32 (tokens, width) per query, each vector of length 1."""
        return self.encode_ids([self.query_ids(text) for text in texts], "query")


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
    reading = family.architecture.reading(weights)
    found = TextTokenizer(tokenizer, lower_case=family.lower_case, reading=reading) if tokenizer else None
    return Encoder(model, arrays, scales, found, query_tokens, reading)


@contextmanager
def text_encoder(
    run: Run[Any], tokens: TensorReader, adapter: Path | None, *, precision: str = "float32", strength: float = 1.0
) -> Iterator[Callable[[str, Role], np.ndarray]]:
    """(text_id, role) -> its vectors. The weights are in memory within the block only."""
    weights, family = run.needs["encoder"], run.needs["family"]
    held = [load_encoder(weights, None, family, adapter, precision=precision, strength=strength)]
    try:
        # One text at a time, so that no row depends on another.
        yield lambda text_id, role: held[0].encode_ids([tokens.read(text_id)], role)[0]
    finally:
        held.clear()  # the function may outlive this
        gc.collect()
        mx.clear_cache()
