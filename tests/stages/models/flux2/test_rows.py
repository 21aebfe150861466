"""Images in strips of rows: the same latents and pictures, whatever the strips, and their memory."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from stages import kernels
from stages.models.flux2 import autoencoder
from stages.models.flux2.autoencoder import Autoencoder, AutoencoderConfig, arrange, query_rows
from stages.models.flux2.random_weights import weight
from stages.models.flux2.sizes import AUTOENCODER

SIZES: dict[str, Any] = {**AUTOENCODER, "block_out_channels": (8, 16, 16, 16), "layers_per_block": 1, "norm_num_groups": 4}


@pytest.fixture(scope="module")
def model() -> Autoencoder:
    config = AutoencoderConfig.from_dict(SIZES)
    arrays = {name: arrange(name, mx.array(weight(f"vae.{name}", shape, 0))) for name, shape in config.shapes().items()}
    return Autoencoder(config, arrays)


@pytest.mark.parametrize(("height", "width"), [(96, 64), (80, 112), (16, 160)])
@pytest.mark.parametrize("strip", [1, 3000, 40000], ids=["a row", "few rows", "many rows"])
def test_a_tiled_image_gives_the_latent_and_the_picture_of_an_untiled_one(model, height, width, strip, monkeypatch):
    image = mx.array(np.random.default_rng(0).uniform(-1, 1, (1, height, width, 3)).astype(np.float32))
    latent = model.encode(image)
    picture = model.decode(latent)
    monkeypatch.setattr(autoencoder, "STRIP_BYTES", strip)
    assert mx.abs(model.encode(image) - latent).max() < 1e-5
    assert mx.abs(model.decode(latent) - picture).max() < 1e-5


def test_strips_follow_from_shapes_and_are_larger_on_a_gpu_with_inexact_products_and_a_small_image_is_one_strip(monkeypatch):
    assert autoencoder.strip_rows(256, 256, 128, 128) == 256
    assert autoencoder.strip_rows(1024, 1024, 128, 128) == 64
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    assert autoencoder.strip_rows(1024, 1024, 128, 128) == 256
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert autoencoder.strip_rows(1024, 1024, 128, 128) == 64
    assert list(autoencoder.windows(10, 4)) == [(0, 4), (4, 8), (8, 10)]


def waited_for(monkeypatch, sizes: list[int], work: int = 0) -> list[int]:
    """Return which strips of the given sizes (in values) a queue waits for, in order, while these strips are started."""
    found: list[int] = []
    monkeypatch.setattr(mx, "eval", lambda strip: found.append(strip.tolist()[0]))
    queue = autoencoder.StripQueue()
    for at, size in enumerate(sizes):
        queue.start(mx.full((size,), at, mx.int32), work)
    return found


def test_a_cpu_waits_for_every_strip_and_a_gpu_for_the_oldest_of_what_exceeds_two_strips(monkeypatch):
    monkeypatch.setattr(autoencoder, "STRIP_BYTES", 400)
    monkeypatch.setattr(autoencoder, "GPU_STRIP_BYTES", 400)
    assert waited_for(monkeypatch, [100, 1, 100]) == [0, 1, 2]
    monkeypatch.setattr(kernels, "compiles", lambda: True)
    assert waited_for(monkeypatch, [100, 100, 100, 100]) == [0, 1]
    assert waited_for(monkeypatch, [10] * 22) == [0, 1], "small strips are started far ahead"
    assert waited_for(monkeypatch, [1, 1, 1], work=150) == [0, 1], "what a strip is computed from counts"
    assert waited_for(monkeypatch, [1000]) == [], "a strip that is too large is started all the same"


@pytest.mark.parametrize("side", [512, 1024, 2048, 4096])
@pytest.mark.parametrize("channels", [(3, 128), (128, 128), (128, 256), (256, 256), (512, 512)])
@pytest.mark.parametrize("device", [mx.cpu, mx.gpu], ids=["cpu", "gpu"])
def test_no_convolution_and_no_attention_exceeds_the_limit_of_one_kernel(side, channels, device, monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: device)
    most = autoencoder.strip_rows(side, side, *channels)
    assert kernels.product_flop(most * side, 9 * channels[0], channels[1]) <= kernels.LIMIT
    positions = (side // 8) ** 2
    assert 2 * kernels.product_flop(query_rows(positions, 512), 512, positions) <= kernels.LIMIT


def test_strips_that_are_used_are_freed_and_a_freed_strip_is_never_read():
    held = autoencoder.Rows([mx.zeros((1, 2, 4, 1)), mx.ones((1, 2, 4, 1))])
    held.free_before(2)
    assert held.strips[0] is None and held.take(2, 4).shape == (1, 2, 4, 1)
    with pytest.raises(AssertionError, match="freed too early"):
        held.take(1, 3)
