"""Text embeddings as a family's transformer reads them: hidden states of a decoder, with padding if it was trained with padding.

T text rows (the family's text_tokens; of a text of its own length, its tokens, and a row of padding if that is repeated), J
features: the hidden size times the number of hidden states taken.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.family import Family
from stages.models.folders import read_config
from stages.models.gguf import SUFFIX, read_architecture
from stages.models.text.decoder import (
    Decoder,
    DecoderConfig,
    Mistral3Config,
    Qwen3Config,
    Qwen3VLConfig,
    from_gguf,
    mask,
    unneeded_beyond,
)
from stages.models.text.tokenisation import PromptTokenizer, TokenizedPrompt
from stages.models.weights import evaluate_each, open_component, read_shapes, weight_files
from stages.untrusted import JSON_BYTES, read_utf8

PRECISIONS = {"bfloat16": mx.bfloat16, "float32": mx.float32}
DECODERS: Mapping[str, type[DecoderConfig]] = {  # by the family's text_kind
    "qwen3": Qwen3Config,
    "qwen3_thinking": Qwen3Config,
    "qwen3_vl": Qwen3VLConfig,
    "mistral3": Mistral3Config,
}


@dataclass(frozen=True)
class Embedding:
    words: np.ndarray  # uint16 (T, J), the bits of bfloat16 values, padding included
    tokens: int  # without padding; their rows are consecutive
    dropped: int  # tokens cut off, as the text was too long
    first: int = 0  # row of the first token that is not padding

    @property
    def real(self) -> np.ndarray:
        return self.words[self.first : self.first + self.tokens]


class TextEncoder:
    """A family's text encoder with its tokenizer. Layers that the family's embeddings do not need are not loaded."""

    def __init__(
        self,
        weights: Path,
        tokenizer: Path,
        family: Family,
        precision: str,
        arrange: Callable[[str, mx.array], Any] | None = None,
        by_layer: bool = False,
    ) -> None:
        """`arrange(name, weight)` may pack a layer's weight. `by_layer` reads the layers again in every call of `encode`."""
        self.prompts = PromptTokenizer(tokenizer, family)
        self.layers = family.text_layers
        self.path, self.by_layer, self.arrange, self.dtype = weights, by_layer, arrange, PRECISIONS[precision]
        self.config = text_encoder_sizes(weights, family)
        rows, highest = self.config.vocab_size, self.prompts.highest
        if highest >= rows:  # for an index beyond a table MLX reads garbage without an error, or ends the process
            raise ValueError(
                f"the tokenizer in {tokenizer} has ids up to {highest}, but the text encoder in {weights} has {rows}: "
                "they do not belong together"
            )
        opened = self._open()  # errors are found before the first text
        self.model = Decoder(self.config, {} if by_layer else self._read(opened, ""))

    def _open(self) -> dict[str, mx.array]:
        deepest = max(self.layers)
        unneeded = unneeded_beyond(deepest, self.config.num_hidden_layers)
        convert = None
        if "token_embd.weight" in read_shapes(self.path):
            convert = functools.partial(
                from_gguf, head_dim=self.config.head_dim, interleaved=not self.config.head_norms, path=self.path
            )
        shapes = self.config.shapes(deepest)
        return open_component(self.path, shapes, convert=convert, rename=self.config.weight_name, ignore=unneeded)

    def _read(self, opened: dict[str, mx.array], prefix: str) -> dict[str, Any]:
        def packed(name: str, weight: mx.array) -> Any:
            return self.arrange(name, weight) if self.arrange and name.startswith("layers.") else weight

        arrays = {name: opened.pop(name) for name in list(opened) if name.startswith(prefix)}
        return evaluate_each(arrays, self.dtype, packed)

    def encode(self, texts: list[str]) -> Iterator[Embedding]:
        if self.by_layer:
            yield from self._encode_by_layer(texts)
            return
        # Not batched: rows of a wider product differ in their last bits, so an embedding would depend on the other texts of
        # its batch. The rows of one text keep a device busy anyway.
        for text in texts:
            prompt = self.prompts(text)
            states_1TJ = self.model.encode(*rows(prompt), self.layers)
            yield _embedding(prompt, as_words(states_1TJ[0]))

    def _encode_by_layer(self, texts: list[str]) -> Iterator[Embedding]:
        prompts, opened = [self.prompts(text) for text in texts], self._open()
        table = self._read(opened, "embed_tokens.")["embed_tokens.weight"]
        given = [rows(prompt) for prompt in prompts]
        hidden = [table[tokens_1T] for tokens_1T, _ in given]
        seen = [mask(real_1T) for _, real_1T in given]
        mx.eval(hidden, seen)
        del table
        final = self._read(opened, "norm.")
        words: list[dict[int, np.ndarray]] = [{0: as_words(h_1TD[0])} if 0 in self.layers else {} for h_1TD in hidden]
        for i in range(max(self.layers)):
            self.model.weights = final | self._read(opened, f"layers.{i}.")
            for n in range(len(hidden)):
                hidden[n] = self.model.layer(i, hidden[n], seen[n])
                mx.eval(hidden[n])
                if i + 1 in self.layers:
                    words[n][i + 1] = as_words(self.model.state(i + 1, hidden[n])[0])
            self.model.weights = {}
        for prompt, states in zip(prompts, words, strict=True):
            yield _embedding(prompt, np.concatenate([states[k] for k in self.layers], axis=-1))


def rows(prompt: TokenizedPrompt) -> tuple[mx.array, mx.array]:
    """(ids, real), int32 and boolean (1, tokens). Padding at the start is shortened to one token."""
    # Hidden states of all padding at the start are equal: no real token attends to it, and it attends to none.
    start = max(prompt.first - 1, 0)
    place_T = mx.arange(start, prompt.ids.size)
    real_T = (place_T >= prompt.first) & (place_T < prompt.first + prompt.real)
    return mx.array(prompt.ids[start:])[None], real_T[None]


def _embedding(prompt: TokenizedPrompt, words: np.ndarray) -> Embedding:
    # The inverse of `rows`: one row of padding at the start stands for all of it.
    padding = np.repeat(words[:1], prompt.ids.size - len(words), axis=0)
    return Embedding(np.concatenate([padding, words]), prompt.real, prompt.dropped, prompt.first)


def text_encoder_sizes(path: Path | None, family: Family) -> DecoderConfig:
    """From the config.json at `path`, else from `family`. Raises ValueError if that or the names of the weights are those of
    another text encoder.
    """
    kind = DECODERS[family.text_kind]
    config = read_config(path) if path else {}
    made = kind.from_dict(config or family.text_encoder)
    if path and kind.vision is not None:
        _check_kind(kind, path, "model_type" in config)
    return made


VISUAL = re.compile(r"(^|\.)(visual|language_model)\.")  # in names of a model with a vision part


def _check_kind(kind: type[DecoderConfig], path: Path, stated: bool) -> None:
    """Qwen3 and the text part of Qwen3-VL have the same names and shapes, and Qwen3 4B and Qwen3-VL 4B the same sizes. What tells
    them apart: the names of the whole model, GGUF's header, and a chat template with a place for pictures, as mflux saves.
    """
    try:
        names = list(read_shapes(path))
        packed = [read_architecture(file) for file in weight_files(path) if file.suffix == SUFFIX]
        templates = [file.name for file in path.glob("chat_template.*") if "<|vision_start|>" in read_utf8(file, JSON_BYTES)]
    except ValueError:  # loading them says what is wrong
        return
    found = next((name for name in [*names, *packed] if VISUAL.search(name) or name == "qwen3vl"), "") or " ".join(templates)
    if found and not kind.vision:
        raise ValueError(f"{path} holds Qwen3-VL ({found}), where this family has {kind.title}: use its own text encoder")
    if kind.vision and not found and not stated:
        raise ValueError(
            f"{path} may be Qwen3 or the text part of {kind.title}, which this family has: they differ in their config.json, and "
            "there is none; put it beside the weights, or use a file of the whole model"
        )


def is_text_encoder(shapes: Mapping[str, tuple[int, ...]], family: Family) -> bool:
    """Whether weights of these names and shapes are the family's text encoder, in transformers' names or GGUF's. Qwen3 and the
    text part of Qwen3-VL look alike: `text_encoder_sizes` tells them apart.
    """
    if DECODERS[family.text_kind].vision is False and any(VISUAL.search(name) for name in shapes):
        return False

    def rows_of(*endings: str) -> int:
        dotted = tuple(f".{ending}" for ending in endings)
        return next((s[0] for name, s in shapes.items() if s and "vision" not in name and f".{name}".endswith(dotted)), 0)

    table = rows_of("embed_tokens.weight", "token_embd.weight")
    norm = rows_of("layers.0.input_layernorm.weight", "blk.0.attn_norm.weight")
    return (table, norm) == (family.text_encoder["vocab_size"], family.text_encoder["hidden_size"])


def as_words(values_TJ: mx.array) -> np.ndarray:
    """Rounded to bfloat16, whose bits are returned as uint16."""
    return np.array(values_TJ.astype(mx.bfloat16).view(mx.uint16))


def widen(words: np.ndarray) -> np.ndarray:
    """bfloat16 values, as `as_words` returns them, to float32."""
    return (words.astype(np.uint32) << 16).view(np.float32)
