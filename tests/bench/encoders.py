"""One step of the encoders for the benchmark: an image through the autoencoder, a caption through the text encoder.

Weights are random and have the shapes of the family.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.models import autoencoder
from stages.models.family import Family
from stages.models.text.decoder import Decoder
from stages.models.text.encoder import text_encoder_sizes
from stages.text_to_image.embeddings.config import EmbeddingsConfig
from stages.text_to_image.embeddings.stage import load_encoder
from stages.tuner.weights import pack_if_possible
from tests.bench.suites import CAPTION_TOKENS

BATCH = 8  # captions at a time, as by default in [embeddings]
LARGE, COPIES = 100_000_000, 8  # values from which an array repeats a part of itself, so many times


def random_weights(
    shapes: dict[str, tuple[int, ...]], dtype: Any, arrange: Callable[[str, mx.array], Any] = lambda name, value: value
) -> dict[str, Any]:
    """Draw an array for every shape, one after another: matrices with standard deviation 1 / sqrt(inputs), vectors of ones.
    `arrange` may pack each before the next is drawn.
    """
    weights = {}
    for number, (name, shape) in enumerate(shapes.items()):
        scale = math.prod(shape[1:]) ** -0.5
        # Numbers of a table of words would take five times its size while they are drawn.
        copies = COPIES if math.prod(shape) > LARGE and shape[0] % COPIES == 0 else 1
        value = mx.random.normal((shape[0] // copies, *shape[1:]), dtype, key=mx.random.key(number)) * scale
        value = mx.concatenate([value] * copies) if copies > 1 else value
        weights[name] = arrange(name, value if len(shape) > 1 else mx.ones(shape, dtype))
        mx.eval(weights[name])
    return weights


def autoencoder_module(record: Family) -> Any:
    """The module of the family's architecture that has its `Autoencoder` and `AutoencoderConfig`."""
    return sys.modules[record.architecture.load_autoencoder.__module__]


class Images:
    """The autoencoder with one random image of `size` (width, height)."""

    def __init__(self, family: Family, size: tuple[int, int], dtype: Any) -> None:
        module = autoencoder_module(family)
        config = module.AutoencoderConfig.from_dict(family.autoencoder)
        weights = {key: autoencoder.arrange(key, value) for key, value in random_weights(config.shapes(), dtype).items()}
        self.model = module.Autoencoder(config, weights)
        self.pixels_BHWC = mx.random.uniform(-1, 1, (1, size[1], size[0], 3), dtype)
        mx.eval(weights, self.pixels_BHWC)

    def step(self) -> None:
        mx.eval(self.model.encode(self.pixels_BHWC))


class Latents(Images):
    """The autoencoder with one random latent, to be decoded."""

    def __init__(self, family: Family, size: tuple[int, int], dtype: Any) -> None:
        super().__init__(family, size, dtype)
        step = family.architecture.pixels_per_token
        channels = family.architecture.transformer_config(None, family).latent_channels
        self.latent_BChw = mx.random.normal((1, channels, size[1] // step, size[0] // step))
        del self.pixels_BHWC
        mx.eval(self.latent_BChw)

    def step(self) -> None:
        mx.eval(self.model.decode(self.latent_BChw))


class Captions:
    """The text encoder with one random caption, padded to the family's number of text tokens."""

    def __init__(self, family: Family, dtype: Any, bits: int = 16) -> None:
        config = text_encoder_sizes(None, family)
        self.layers = family.text_layers

        def arrange(name: str, value: mx.array) -> Any:
            return pack_if_possible(value, bits) if name.startswith("layers.") else value

        self.model = Decoder(config, random_weights(config.shapes(max(self.layers)), dtype, arrange))
        T = family.text_tokens
        self.tokens_BT = mx.random.randint(0, config.vocab_size, (1, T))
        # The other rows are padding, which is computed too.
        self.real_BT = mx.arange(T)[None] < min(CAPTION_TOKENS, T)

    def step(self) -> None:
        mx.eval(self.model.encode(self.tokens_BT, self.real_BT, self.layers))


class CaptionsFromFiles:
    """The text encoder as the stage `embeddings` loads it from `folder`, with a batch of captions."""

    def __init__(self, family: Family, folder: Path, config: EmbeddingsConfig) -> None:
        self.encoder = load_encoder(family, folder / "text_encoder", folder / "tokenizer", config)

    def step(self) -> None:
        list(self.encoder.encode([f"{n}: a photograph of a small cat that sits on a red chair" for n in range(BATCH)]))
