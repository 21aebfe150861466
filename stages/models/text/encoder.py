"""Text embeddings as the FLUX.2 transformer reads them. They are hidden states of a decoder, padding included.

The transformer was trained with the padding. T text rows (the family's text_tokens), J features: the hidden size times
the number of hidden states taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.family import Family
from stages.models.folders import component_config
from stages.models.reading import evaluate_each
from stages.models.text.decoder import Decoder, DecoderConfig, mask, unneeded_beyond
from stages.models.text.gguf_names import from_gguf, is_gguf
from stages.models.text.mistral3 import Mistral3Config
from stages.models.text.qwen3 import Qwen3Config
from stages.models.text.tokenisation import PromptTokenizer, TokenizedPrompt
from stages.models.weights import open_component, read_keys

PRECISIONS = {"bfloat16": mx.bfloat16, "float32": mx.float32}
DECODERS: Mapping[str, type[DecoderConfig]] = {"qwen3": Qwen3Config, "mistral3": Mistral3Config}  # by the family's text_kind


@dataclass(frozen=True)
class Embedding:
    """The embedding of one text. `words` is a uint16 array (tokens with padding, features). Each uint16 holds the 16
    bits of one value in bfloat16. `tokens` is the number of tokens without padding. Their rows are consecutive, and
    `first` is the index of the first one. `dropped` is the number of tokens that were cut off because the text was too
    long.
    """

    words: np.ndarray
    tokens: int
    dropped: int
    first: int = 0

    @property
    def real(self) -> np.ndarray:
        """The embedding without padding, a uint16 array (tokens, features). Each uint16 holds the 16 bits of one value
        in bfloat16.
        """
        return self.words[self.first : self.first + self.tokens]


class TextEncoder:
    """The text encoder of a model family, with its tokenizer. `encode(texts)` yields one `Embedding` per text. Layers
    that the family's embeddings do not need are not loaded.
    """

    def __init__(
        self,
        weights: Path,
        tokenizer: Path,
        family: Family,
        precision: str,
        arrange: Callable[[str, mx.array], Any] | None = None,
        by_layer: bool = False,
    ) -> None:
        """Load the text encoder from `weights`, a folder or a file, and its tokenizer from the folder `tokenizer`.
        `family` is the record of the model family. `precision` is the dtype to compute in, "bfloat16" or "float32".
        `arrange(name, weight)` returns an object to use in place of a layer's weight, such as a packed (quantised) one.
        None replaces no weight. If `by_layer` is True, weights are in memory only during a call of `encode`. Raises
        ValueError if files are missing, damaged or of another model.

        With `by_layer`, every call of `encode` reads the layers one after another. ValueError is also raised if the
        tokenizer does not belong to the weights.
        """
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
        """Return the weights of the text encoder as a dict from name to array. MLX reads the data of an array only when
        it is computed. Weights of layers that are not needed are left out. Raises ValueError if files are missing,
        damaged or of another model.
        """
        deepest = max(self.layers)
        unneeded = unneeded_beyond(deepest, self.config.num_hidden_layers)
        convert = None
        if is_gguf(read_keys(self.path)):
            convert = functools.partial(
                from_gguf, head_dim=self.config.head_dim, interleaved=not self.config.head_norms, path=self.path
            )
        shapes = self.config.shapes(deepest)
        return open_component(self.path, shapes, convert=convert, rename=self.config.weight_name, ignore=unneeded)

    def _read(self, opened: dict[str, mx.array], prefix: str) -> dict[str, Any]:
        """Load the weights whose names start with `prefix`, and return them as a dict from name to weight. `opened`
        maps names to lazy arrays, which MLX has not computed yet. The returned weights are removed from `opened`.
        Floating-point weights are cast to the dtype of the encoder. If `self.arrange` is set, the result of
        `self.arrange(name, weight)` replaces each weight of a layer. For example, `arrange` may return a packed
        (quantised) weight. Raises ValueError if a weight contains infinity or NaN.
        """

        def packed(name: str, weight: mx.array) -> Any:
            return self.arrange(name, weight) if self.arrange and name.startswith("layers.") else weight

        arrays = {name: opened.pop(name) for name in list(opened) if name.startswith(prefix)}
        return evaluate_each(arrays, self.dtype, packed)

    def encode(self, texts: list[str]) -> Iterator[Embedding]:
        """Encode the texts one by one, in order. Yield an embedding for each.

        Texts are not batched: rows of a wider matrix product differ in their last bits, so an embedding would depend on
        the other texts of its batch. The rows of one text keep a device busy anyway.
        """
        if self.by_layer:
            yield from self._encode_by_layer(texts)
            return
        for text in texts:
            prompt = self.prompts(text)
            states_1TJ = self.model.encode(*rows(prompt), self.layers)
            yield _embedding(prompt, as_words(states_1TJ[0]))

    def _encode_by_layer(self, texts: list[str]) -> Iterator[Embedding]:
        """Encode the texts together: each layer is read, applied to every text, and freed. The results are those of
        `encode`.
        """
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
    """Return `(ids, real)`: the token ids of `prompt`, and a mask that is False for padding. `prompt` is a tokenized
    prompt with padding. `ids` is an int32 array (1, tokens), and `real` is a boolean array (1, tokens). Padding at the
    end is kept. Padding at the start is shortened to one token. For example, the ids [0, 0, 0, 7, 8] with the padding
    id 0 become [0, 7, 8].

    The hidden states of all padding tokens at the start are equal, so one of them is enough. No real token attends to
    them, and they attend to no real token.
    """
    start = max(prompt.first - 1, 0)
    place_T = mx.arange(start, prompt.ids.size)
    real_T = (place_T >= prompt.first) & (place_T < prompt.first + prompt.real)
    return mx.array(prompt.ids[start:])[None], real_T[None]


def _embedding(prompt: TokenizedPrompt, words: np.ndarray) -> Embedding:
    """Return the embedding of `prompt`, with one row for each token. `words` holds the computed rows as a uint16 array
    (rows, features). Each uint16 holds the 16 bits of one bfloat16 value. If `prompt` has padding at the start, `words`
    has one row for all of it. This row is repeated.
    """
    padding = np.repeat(words[:1], prompt.ids.size - len(words), axis=0)
    return Embedding(np.concatenate([padding, words]), prompt.real, prompt.dropped, prompt.first)


def text_encoder_sizes(path: Path | None, family: Family) -> DecoderConfig:
    """Return the sizes of the text encoder at `path`, a folder or a file. If `path` is None or has no config.json, they
    come from `family`. Raises ValueError if the config is not that of a supported text encoder.
    """
    config = component_config(path, family.text_encoder) if path else family.text_encoder
    return DECODERS[family.text_kind].from_dict(config)


def as_words(values_TJ: mx.array) -> np.ndarray:
    """Round the values of an array to bfloat16, and return their bits as a uint16 NumPy array of the same shape."""
    return np.array(values_TJ.astype(mx.bfloat16).view(mx.uint16))


def widen(words: np.ndarray) -> np.ndarray:
    """Convert bfloat16 values to a float32 array of the same shape. `words` holds the bfloat16 values as uint16 words."""
    return (words.astype(np.uint32) << 16).view(np.float32)
