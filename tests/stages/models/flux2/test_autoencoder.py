"""The autoencoder against diffusers', whole and in strips of rows, and in the layout of a single file."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.models import autoencoder
from stages.models.autoencoder import arrange
from stages.models.flux2.autoencoder import Autoencoder, AutoencoderConfig, load_autoencoder, memory
from stages.models.flux2.random_weights import weight
from stages.text_to_image.families import AUTOENCODER, TINY_AUTOENCODER, family
from tests import checkpoints

SIZES = {"block_out_channels": (32, 32, 64, 64), "norm_num_groups": 8}
OTHER = SIZES | {"decoder_block_out_channels": (16, 24, 32, 48), "layers_per_block": 1, "mid_block_add_attention": False}
OTHER |= {"use_quant_conv": False, "use_post_quant_conv": False}


def reference(**sizes):
    """diffusers' autoencoder with random weights and statistics."""
    import torch
    from diffusers import AutoencoderKLFlux2

    torch.manual_seed(0)
    made = AutoencoderKLFlux2(**sizes).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
        made.bn.running_mean.normal_()
        made.bn.running_var.uniform_(0.5, 2.0)
    return made.requires_grad_(False)


@pytest.fixture(scope="module")
def released():
    return reference(**SIZES)


def ours(made, folder, **given):
    made.save_pretrained(folder / "vae")
    return load_autoencoder(folder / "vae", family("klein-4b"), **given)


def images(*shape):
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def encoded(made, images_BHWC):
    """The pipeline's way from an image to a latent: posterior mean, 2x2 patches into channels, batch-norm statistics."""
    import torch

    mean = made.encode(torch.tensor(images_BHWC).permute(0, 3, 1, 2)).latent_dist.mode()
    folded = torch.nn.functional.pixel_unshuffle(mean, 2)
    spread = torch.sqrt(made.bn.running_var + made.config.batch_norm_eps)
    return ((folded - made.bn.running_mean[:, None, None]) / spread[:, None, None]).numpy()


def decoded(made, latents_BChw):
    import torch

    spread = torch.sqrt(made.bn.running_var + made.config.batch_norm_eps)
    folded = torch.tensor(latents_BChw) * spread[:, None, None] + made.bn.running_mean[:, None, None]
    return made.decode(torch.nn.functional.pixel_shuffle(folded, 2)).sample.permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("sizes", [SIZES, OTHER], ids=["as released", "otherwise"])
def test_encode_and_decode_are_those_of_diffusers(sizes, tmp_path):
    made = reference(**sizes)
    model = ours(made, tmp_path)
    x_BHWC = images(2, 48, 80, 3)
    latents = encoded(made, x_BHWC)
    assert latents.shape == (2, 128, 3, 5)
    np.testing.assert_allclose(np.array(model.encode(mx.array(x_BHWC))), latents, atol=1e-4)
    np.testing.assert_allclose(np.array(model.decode(mx.array(latents))), decoded(made, latents), atol=1e-4)


@pytest.mark.parametrize("widths", [None, (16, 24, 32, 48)], ids=["as released", "the small decoder"])
def test_a_file_in_the_makers_layout_gives_the_same_model_whose_decoder_is_recognised_by_its_shapes(widths, tmp_path):
    made = reference(**SIZES, decoder_block_out_channels=widths)
    model, file = ours(made, tmp_path), tmp_path / "ae.safetensors"
    state = checkpoints.autoencoder_as_single_file(made.state_dict())
    save_file({key: value.contiguous().numpy() for key, value in state.items()}, file)
    sized = dataclasses.replace(family("klein-4b"), autoencoder={**AUTOENCODER, **SIZES})
    other = load_autoencoder(file, sized)
    assert set(other.weights) == set(model.weights) and other.config.decoder_channels == model.config.decoder_channels
    for key, value in model.weights.items():
        assert mx.array_equal(value, other.weights[key]), key
    assert (memory(file, sized, 64, 64, 4, False) != memory(None, sized, 64, 64, 4, False)) is bool(widths)


def test_the_shapes_are_those_of_the_released_file():
    import torch
    from diffusers import AutoencoderKLFlux2

    shapes = AutoencoderConfig.from_dict(AUTOENCODER).shapes()
    assert len(shapes) == 250  # and one counter, which is not read
    with torch.device("meta"):
        state = AutoencoderKLFlux2().state_dict()
    assert shapes == {k: tuple(v.shape) for k, v in state.items() if k != "bn.num_batches_tracked"}


def test_decoding_an_encoding_in_bfloat16_stays_near_float32(released, tmp_path):
    exact, half = ours(released, tmp_path), ours(released, tmp_path, dtype=mx.bfloat16)
    assert half.weights["bn.running_var"].dtype == mx.float32
    x_BHWC = mx.array(images(1, 32, 32, 3))
    assert half.encode(x_BHWC).dtype == mx.float32
    assert float(mx.abs(half.encode(x_BHWC) - exact.encode(x_BHWC)).max()) < 0.1


def test_an_image_is_encoded_to_the_same_bits_wherever_it_lies_in_memory(released, tmp_path):
    model = ours(released, tmp_path)
    first = np.array(model.encode(mx.array(images(1, 48, 64, 3))))
    kept = [mx.ones(i * 1000 + 1) + 1 for i in range(5)]
    mx.eval(kept)
    assert np.array_equal(first, np.array(model.encode(mx.array(images(1, 48, 64, 3)))))


@pytest.mark.parametrize(("height", "width", "strip"), [(64, 48, 1), (48, 80, 3000), (16, 96, 3000), (64, 48, 40000)])
def test_strips_of_an_image_and_passes_of_attention_give_the_latent_and_the_picture_of_the_whole(
    height, width, strip, monkeypatch
):
    config = AutoencoderConfig.from_dict(TINY_AUTOENCODER)
    arrays = {name: arrange(name, mx.array(weight(f"vae.{name}", shape, 0))) for name, shape in config.shapes().items()}
    model, image = Autoencoder(config, arrays), mx.array(images(1, height, width, 3))
    latent = model.encode(image)
    picture = model.decode(latent)
    monkeypatch.setattr(autoencoder, "STRIP_BYTES", strip)
    monkeypatch.setattr(autoencoder, "QUERIES", 7)
    assert mx.abs(model.encode(image) - latent).max() < 1e-5
    assert mx.abs(model.decode(latent) - picture).max() < 1e-5
