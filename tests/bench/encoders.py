"""One step of the encoders for the benchmark: an image through the autoencoder, a caption through the text encoder.

Weights are random and have the shapes of the family.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from stages.models.family import Family
from stages.models.flux2 import autoencoder
from stages.models.flux2.autoencoder import AutoencoderConfig
from stages.models.text.decoder import Decoder
from stages.models.text.encoder import text_encoder_sizes
from stages.tuner.weights import pack_if_possible

CAPTION_TOKENS = 60  # a caption of usual length; the other rows are padding, which is computed too


def random_weights(shapes: dict[str, tuple[int, ...]], dtype: Any) -> dict[str, mx.array]:
    """Draw an array for every shape, one after another: matrices with standard deviation 1 / sqrt(inputs), vectors of ones."""
    weights = {}
    for number, (name, shape) in enumerate(shapes.items()):
        scale = math.prod(shape[1:]) ** -0.5
        value = mx.random.normal(shape, dtype, key=mx.random.key(number)) * scale
        weights[name] = value if len(shape) > 1 else mx.ones(shape, dtype)
        mx.eval(weights[name])
    return weights


class Images:
    """The autoencoder with one random image of `size` (width, height)."""

    def __init__(self, family: Family, size: tuple[int, int], dtype: Any) -> None:
        """Draw weights and one image of `size` (width, height) pixels."""
        config = AutoencoderConfig.from_dict(family.autoencoder)
        weights = {key: autoencoder.arrange(key, value) for key, value in random_weights(config.shapes(), dtype).items()}
        self.model = autoencoder.Autoencoder(config, weights)
        self.pixels_BHWC = mx.random.uniform(-1, 1, (1, size[1], size[0], 3), dtype)
        mx.eval(weights, self.pixels_BHWC)

    def step(self) -> None:
        mx.eval(self.model.encode(self.pixels_BHWC))


class Latents(Images):
    """The autoencoder with one random latent, to be decoded."""

    def __init__(self, family: Family, size: tuple[int, int], dtype: Any) -> None:
        super().__init__(family, size, dtype)
        self.latent_BChw = mx.random.normal((1, 128, size[1] // 16, size[0] // 16))
        del self.pixels_BHWC
        mx.eval(self.latent_BChw)

    def step(self) -> None:
        mx.eval(self.model.decode(self.latent_BChw))


class Captions:
    """The text encoder with one random caption, padded to the family's number of text tokens."""

    def __init__(self, family: Family, dtype: Any, bits: int = 16) -> None:
        """Draw weights, packed to `bits` bits within the layers, and one caption."""
        config = text_encoder_sizes(None, family)
        self.layers = family.text_layers
        weights: dict[str, Any] = random_weights(config.shapes(max(self.layers)), dtype)
        for name in [name for name in weights if name.startswith("layers.")]:
            weights[name] = pack_if_possible(weights.pop(name), bits)
        self.model = Decoder(config, weights)
        T = family.text_tokens
        self.tokens_BT = mx.random.randint(0, config.vocab_size, (1, T))
        self.real_BT = mx.arange(T)[None] < min(CAPTION_TOKENS, T)

    def step(self) -> None:
        mx.eval(self.model.encode(self.tokens_BT, self.real_BT, self.layers))
