"""Text embeddings as the FLUX.2 transformer reads them. They are hidden states of Qwen3, padding included.

The transformer was trained with the padding. T text rows (the family's text_tokens), J features: the hidden size times the number
of hidden states taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from stages.models.family import Family
from stages.models.folders import component_config
from stages.models.text import qwen3
from stages.models.text.tokenisation import PromptTokenizer
from stages.models.weights import load_component

PRECISIONS = {"bfloat16": mx.bfloat16, "float32": mx.float32}


@dataclass(frozen=True)
class Embedding:
    """The embedding of one text. `words` is its bfloat16 values as uint16 words, (tokens with padding, features). `tokens` is the
    number of tokens without padding. `dropped` is the number of tokens that were cut off from a text that is too long.
    """

    words: np.ndarray
    tokens: int
    dropped: int


class TextEncoder:
    """A model family's text encoder with its tokenizer. It turns texts into embeddings. Only the layers that the family's
    embeddings need are in memory.
    """

    def __init__(self, weights: Path, tokenizer: Path, family: Family, precision: str) -> None:
        """Load the text encoder and its tokenizer. `weights` is the folder or file of the weights. `tokenizer` is the tokenizer's
        folder. `family` is the record of the model family. `precision` is the dtype to compute in, "bfloat16" or "float32".
        Raises ValueError if files are missing, damaged or of another model. Raises it too if the tokenizer does not belong to the
        weights.
        """
        self.prompts = PromptTokenizer(tokenizer, family)
        self.layers = family.text_layers
        config = qwen3.Qwen3Config.from_dict(component_config(weights, family.text_encoder))
        known = len(self.prompts.tokenizer)
        if known > config.vocab_size:  # MLX reads garbage, without an error, for an index beyond a table
            raise ValueError(
                f"the tokenizer in {tokenizer} has {known} tokens, but the text encoder in {weights} has {config.vocab_size}: "
                "they do not belong together"
            )
        deepest = max(self.layers)
        unneeded = qwen3.unneeded_beyond(deepest, config.num_hidden_layers)
        loaded = load_component(
            weights, config.shapes(deepest), rename=qwen3.rename, dtype=PRECISIONS[precision], ignore=unneeded
        )
        self.model = qwen3.Qwen3(config, loaded)

    def encode(self, texts: list[str]) -> Iterator[Embedding]:
        """Encode the texts one by one, in order. Yield an embedding for each.

        Texts are not batched: rows of a wider matrix product differ in their last bits, so an embedding would depend on the other
        texts of its batch. The rows of one text keep a device busy anyway.
        """
        for text in texts:
            prompt = self.prompts(text)
            real_1T = mx.arange(self.prompts.length)[None] < prompt.real
            states_1TJ = self.model.encode(mx.array(prompt.ids)[None], real_1T, self.layers)
            words_TJ = np.array(states_1TJ[0].astype(mx.bfloat16).view(mx.uint16))
            yield Embedding(words_TJ, prompt.real, prompt.dropped)


def widen(words: np.ndarray) -> np.ndarray:
    """Convert bfloat16 values to a float32 array of the same shape. `words` holds the bfloat16 values as uint16 words."""
    return (words.astype(np.uint32) << 16).view(np.float32)
