"""The tiny model: the same everywhere."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from stages.models.flux2 import random_weights
from stages.models.flux2.autoencoder import AutoencoderConfig, load_autoencoder
from stages.text_to_image.families import family
from tests.stages.models.test_gguf import file_of

TINY = family("tiny")


def test_one_seed_gives_the_same_bytes_on_every_machine_and_another_does_not(tiny_weights: Path, tmp_path: Path) -> None:
    def digests(folder: Path) -> dict[str, str]:
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    for name, seed in (("again", 0), ("other", 1)):
        TINY.architecture.write_random_weights(tmp_path / name, TINY, seed)
    first, again, other = (digests(folder) for folder in (tiny_weights, tmp_path / "again", tmp_path / "other"))
    assert again == first
    assert {name for name in first if other[name] != first[name]} == {name for name in first if name.endswith(".safetensors")}
    values = random_weights.weight("transformer.proj_out.weight", (128, 64), 0)
    assert hashlib.sha256(values.tobytes()).hexdigest()[:16] == "4d85ff08bd6099f8"


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
