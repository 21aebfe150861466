"""The tiny model: the same everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from stages.models.flux2 import random_weights
from stages.models.flux2.autoencoder import AutoencoderConfig, load_autoencoder
from stages.text_to_image.families import family
from tests.stages.models.test_gguf import file_of

TINY = family("tiny")


def test_an_autoencoder_as_gguf_without_a_config_is_read_with_the_widths_of_its_decoder(
    tiny_weights: Path, tmp_path: Path
) -> None:
    widths = {"block_out_channels": (8, 16, 16, 16), "decoder_block_out_channels": (4, 8, 12, 16)}
    record = replace(TINY, autoencoder={**TINY.autoencoder, **widths})
    shapes = AutoencoderConfig.from_dict(record.autoencoder).shapes()
    arrays = {name: random_weights.weight(f"vae.{name}", shape, 0) for name, shape in shapes.items()}
    tensors = [(name, value.shape, 0, value.tobytes()) for name, value in arrays.items()]
    (tmp_path / "ae.gguf").write_bytes(file_of(tensors))
    read = load_autoencoder(tmp_path / "ae.gguf", TINY, mx.float32)
    assert read.config.decoder_channels == widths["decoder_block_out_channels"]
    assert np.array_equal(
        np.array(read.weights["decoder.conv_in.weight"]).transpose(0, 3, 1, 2), arrays["decoder.conv_in.weight"]
    )
