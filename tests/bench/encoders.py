"""What it takes to encode: an image by the autoencoder, a caption by the text encoder. True shapes, random weights."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from stages.models.family import Family
from stages.models.flux2 import autoencoder
from stages.models.text.qwen3 import Qwen3, Qwen3Config

CAPTION_TOKENS = 60  # real ones; the rest of the rows is padding, which is computed too


def drawn(shapes: dict[str, tuple[int, ...]], dtype: Any) -> dict[str, mx.array]:
    """Random weights, one after another."""
    weights = {}
    for number, (name, shape) in enumerate(shapes.items()):
        spread = math.prod(shape[1:]) ** -0.5
        value = mx.random.normal(shape, dtype, key=mx.random.key(number)) * spread
        weights[name] = value if len(shape) > 1 else mx.ones(shape, dtype)
        mx.eval(weights[name])
    return weights


class Images:
    """An image to its latent: `step` encodes one."""

    def __init__(self, family: Family, size: tuple[int, int], dtype: Any) -> None:
        config = autoencoder.AutoencoderConfig.from_dict(family.autoencoder)
        weights = {key: autoencoder.arrange(key, value) for key, value in drawn(config.shapes(), dtype).items()}
        self.model = autoencoder.Autoencoder(config, weights)
        self.pixels_BHWC = mx.random.uniform(-1, 1, (1, size[1], size[0], 3), dtype)
        mx.eval(weights, self.pixels_BHWC)

    def step(self) -> None:
        """Encode the image."""
        mx.eval(self.model.encode(self.pixels_BHWC))


class Captions:
    """A caption to its embedding: `step` encodes one, padded to the family's rows."""

    def __init__(self, family: Family, dtype: Any) -> None:
        config = Qwen3Config.from_dict(family.text_encoder)
        self.layers = family.text_layers
        self.model = Qwen3(config, drawn(config.shapes(max(self.layers)), dtype))
        T = family.text_tokens
        self.tokens_BT = mx.random.randint(0, config.vocab_size, (1, T))
        self.real_BT = mx.arange(T)[None] < min(CAPTION_TOKENS, T)

    def step(self) -> None:
        """Encode the caption."""
        mx.eval(self.model.encode(self.tokens_BT, self.real_BT, self.layers))
