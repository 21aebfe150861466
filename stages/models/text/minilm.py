"""all-MiniLM-L6-v2, a BERT of six layers, as a sentence encoder: the mean of its last states over a text, at length 1.

Names of tensors are those of its checkpoint. One text at a time, so there is no padding and no mask.

T tokens, D hidden, H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
import numpy as np

from stages.models.weights import load_component

LAYERS, D, INNER, HEADS, VOCABULARY, PLACES, KINDS = 6, 384, 1536, 12, 30522, 512, 2
EPS = 1e-12
TOKENS = 256  # the most that it was trained to read
LINEARS = {
    "attention.self.query": (D, D),
    "attention.self.key": (D, D),
    "attention.self.value": (D, D),
    "attention.output.dense": (D, D),
    "intermediate.dense": (INNER, D),
    "output.dense": (D, INNER),
}
NORMS = ("attention.output.LayerNorm", "output.LayerNorm")


def shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of what the sentence embedding needs: the pooler is not among it."""
    made: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCABULARY, D),
        "embeddings.position_embeddings.weight": (PLACES, D),
        "embeddings.token_type_embeddings.weight": (KINDS, D),
        "embeddings.LayerNorm.weight": (D,),
        "embeddings.LayerNorm.bias": (D,),
    }
    for i in range(LAYERS):
        for name, shape in LINEARS.items():
            made |= {f"encoder.layer.{i}.{name}.weight": shape, f"encoder.layer.{i}.{name}.bias": shape[:1]}
        for name in NORMS:
            made |= {f"encoder.layer.{i}.{name}.weight": (D,), f"encoder.layer.{i}.{name}.bias": (D,)}
    return made


class MiniLM:
    """The encoder with its tokenizer, from the folder of its release: model.safetensors and tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        unneeded = ("pooler.", "embeddings.position_ids")
        self.weights = load_component(
            folder / "model.safetensors", shapes(), dtype=mx.float32, ignore=lambda key: key.startswith(unneeded)
        )
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(TOKENS)

    def encode(self, texts: Iterable[str]) -> np.ndarray:
        """A row of D numbers, of length 1, for each text."""
        return np.stack([np.array(self.embed(self.tokenizer.encode(text).ids)) for text in texts])

    def embed(self, tokens: list[int]) -> mx.array:
        """The embedding (D,) of a text's tokens, with the marks of its begin and end."""
        h_TD = self.weights["embeddings.word_embeddings.weight"][mx.array(tokens)]
        h_TD = h_TD + self.weights["embeddings.position_embeddings.weight"][: len(tokens)]
        h_TD = self._norm("embeddings.LayerNorm", h_TD + self.weights["embeddings.token_type_embeddings.weight"][0])
        for i in range(LAYERS):
            h_TD = self._layer(f"encoder.layer.{i}.", h_TD)
        mean_D = h_TD.mean(axis=0)
        return mean_D / mx.linalg.norm(mean_D)

    def _layer(self, name: str, h_TD: mx.array) -> mx.array:
        h_TD = self._norm(name + NORMS[0], h_TD + self._attend(name + "attention.", h_TD))
        inner = self._linear(name + "intermediate.dense", h_TD)
        inner = inner * (1 + mx.erf(inner / 2**0.5)) / 2  # GELU, exact
        return self._norm(name + NORMS[1], h_TD + self._linear(name + "output.dense", inner))

    def _attend(self, name: str, h_TD: mx.array) -> mx.array:
        T, K = h_TD.shape[0], D // HEADS
        q, k, v = (self._linear(f"{name}self.{part}", h_TD).reshape(T, HEADS, K) for part in ("query", "key", "value"))
        q_HTK, k_HTK, v_HTK = (x.transpose(1, 0, 2) for x in (q, k, v))
        p_HTT = mx.softmax(q_HTK @ k_HTK.swapaxes(-1, -2) * K**-0.5, axis=-1)
        return self._linear(name + "output.dense", (p_HTT @ v_HTK).transpose(1, 0, 2).reshape(T, D))

    def _norm(self, name: str, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], EPS)

    def _linear(self, name: str, x: mx.array) -> mx.array:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]
