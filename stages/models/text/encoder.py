"""From text to the rows that the transformer reads: prompt form, tokens, hidden states.

Every row up to the family's length is kept, padding included, because the transformer was trained to see it.

T rows (the family's text_tokens), D hidden size, J = D times the number of hidden states taken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.family import Family
from stages.models.folders import component_config
from stages.models.text import qwen3
from stages.models.weights import load_component

PRECISIONS = {"bfloat16": mx.bfloat16, "float32": mx.float32}


@dataclass(frozen=True)
class Prompt:
    """One text as the model reads it: token ids, padded (T,); how many are real; how many were cut off its end."""

    tokens: np.ndarray
    real: int
    dropped: int


@dataclass(frozen=True)
class Embedding:
    """One text, encoded: bfloat16 words (T,J), and its prompt's counts."""

    words: np.ndarray
    tokens: int
    dropped: int


class Prompts:
    """Texts to tokens by the family's prompt form: for Qwen3 one user turn of the chat template, with thinking off."""

    def __init__(self, folder: Path, family: Family) -> None:
        """`folder` is a tokenizer's. ValueError where the family's form is not built or the files do not serve."""
        family.require("text_encoder")
        self.length = family.text_tokens
        self.tokenizer = _tokenizer(folder)
        if self.tokenizer.pad_token_id is None:
            raise ValueError(f"{folder} names no pad_token in tokenizer_config.json; it should be <|endoftext|>")
        if not self.tokenizer.chat_template:
            raise ValueError(f"{folder} has no chat template: chat_template.jinja is missing")

    def form(self, text: str) -> str:
        """The text in the form that the model was trained on; empty text too."""
        turn = [{"role": "user", "content": text}]
        made: str = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        return made

    def __call__(self, text: str) -> Prompt:
        """Tokens, cut at the end or padded on the right to the family's length."""
        ids = self.tokenizer(self.form(text), truncation=False, verbose=False)["input_ids"]
        kept = ids[: self.length]
        tokens_T = np.full(self.length, self.tokenizer.pad_token_id, np.int32)
        tokens_T[: len(kept)] = kept
        return Prompt(tokens_T, len(kept), len(ids) - len(kept))


class TextEncoder:
    """A family's text encoder: the layers it needs, in memory, and its tokenizer."""

    def __init__(self, weights: Path, tokenizer: Path, family: Family, precision: str) -> None:
        """`weights` and `tokenizer` are the components' folders; `precision` is bfloat16 or float32."""
        self.prompts = Prompts(tokenizer, family)
        self.layers = family.text_layers
        config = qwen3.Qwen3Config.from_dict(component_config(weights, family.text_encoder))
        known = len(self.prompts.tokenizer)
        if known > config.vocab_size:  # an index beyond a table reads garbage, without an error
            raise ValueError(f"{tokenizer} has {known} tokens, {weights} knows {config.vocab_size}: they do not belong together")
        deepest = max(self.layers)
        unneeded = qwen3.beyond(deepest, config.num_hidden_layers)
        loaded = load_component(
            weights, config.shapes(deepest), rename=qwen3.rename, dtype=PRECISIONS[precision], ignore=unneeded
        )
        self.model = qwen3.Qwen3(config, loaded)

    def encode(self, texts: list[str]) -> Iterator[Embedding]:
        """Each text's embedding, in order, made as it is asked for.

        One text at a time: the rows of a wider matrix product differ in their last bits, so a text's value would
        depend on its neighbours; and a text's T rows fill a device already.
        """
        for text in texts:
            prompt = self.prompts(text)
            real_1T = mx.arange(self.prompts.length)[None] < prompt.real
            states_1TJ = self.model.encode(mx.array(prompt.tokens)[None], real_1T, self.layers)
            words_TJ = np.array(states_1TJ[0].astype(mx.bfloat16).view(mx.uint16))
            yield Embedding(words_TJ, prompt.real, prompt.dropped)


def widen(words: np.ndarray) -> np.ndarray:
    """bfloat16 words as float32 numbers."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def _tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, read from disk alone."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would advise to install torch, which is not needed
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise ValueError(f"there is no tokenizer in {folder}: looked for tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"the tokenizer in {folder} cannot be read: {first}") from None
