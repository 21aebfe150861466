"""Z-Image's autoencoder, FLUX.1's, against diffusers' AutoencoderKL; noise levels, also of FLUX 3; what a file is taken for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.models.flux3.architecture import FLUX3
from stages.models.weights import recognise
from stages.models.z_image.architecture import Z_IMAGE
from stages.models.z_image.autoencoder import AutoencoderConfig, load_autoencoder
from stages.text_to_image.families import FAMILIES, Z_AUTOENCODER, family
from tests.checkpoints import autoencoder_as_single_file, z_image_as_single_file
from tests.stages.models.z_image.test_transformer import folded


def reference(seed: int) -> Any:
    import torch
    from diffusers import AutoencoderKL

    draw = np.random.default_rng(seed)
    widths = tuple((8 * draw.integers(1, 5, 4)).tolist())
    kinds = {f"{way}_block_types": (f"{way.title()}{side}coderBlock2D",) * 4 for way, side in (("down", "En"), ("up", "De"))}
    torch.manual_seed(seed)
    made = AutoencoderKL(
        block_out_channels=widths,
        layers_per_block=int(draw.integers(1, 3)),
        latent_channels=int(draw.integers(2, 17)),
        norm_num_groups=8,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **kinds,
    ).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return made


@pytest.mark.parametrize("seed", range(3))
def test_encode_and_decode_are_those_of_diffusers_also_with_the_weights_of_a_single_file(seed: int, tmp_path: Path) -> None:
    import torch

    made = reference(seed)
    made.save_pretrained(tmp_path / "vae")
    single = {k: v.contiguous().numpy() for k, v in autoencoder_as_single_file(made.state_dict()).items()}
    save_file(single, tmp_path / "ae.safetensors")
    names = [field.name for field in dataclasses.fields(AutoencoderConfig) if field.name in made.config]
    record = dataclasses.replace(family("z-image"), autoencoder={name: made.config[name] for name in names})
    model, other = load_autoencoder(tmp_path / "vae", family("z-image")), load_autoencoder(tmp_path / "ae.safetensors", record)
    assert dataclasses.replace(other.config, decoder_block_out_channels=None) == model.config
    assert set(model.weights) == set(other.weights) and model.config.decoder_channels == other.config.decoder_channels
    assert all(mx.array_equal(value, other.weights[name]) for name, value in model.weights.items())
    x_BHWC = np.random.default_rng(seed).uniform(-1, 1, (2, 32, 48, 3)).astype(np.float32)
    with torch.no_grad():
        z = (made.encode(torch.tensor(x_BHWC).permute(0, 3, 1, 2)).latent_dist.mode() - 0.1159) * 0.3611
        picture = made.decode(z / 0.3611 + 0.1159).sample.permute(0, 2, 3, 1).numpy()
    latents = folded(z.numpy()).transpose(0, 2, 1).reshape(2, -1, 2, 3)
    got, drawn = np.array(model.encode(mx.array(x_BHWC))), np.array(model.decode(mx.array(latents)))
    assert np.abs(got - latents).max() <= 1e-5 * np.abs(latents).max()
    assert np.abs(drawn - picture).max() <= 1e-5 * np.abs(picture).max()


def test_the_released_sizes_give_the_released_number_of_parameters() -> None:
    shapes = AutoencoderConfig.from_dict(Z_AUTOENCODER).shapes()
    assert (len(shapes), sum(int(np.prod(s)) for s in shapes.values())) == (244, 83_819_683)


@pytest.mark.parametrize(("architecture", "shift"), [(Z_IMAGE, 3.0), (FLUX3, 6.93)], ids=["z-image", "flux3"])
def test_the_noise_levels_are_those_of_diffusers(architecture: Any, shift: float) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    for steps in (1, 4, 50):
        made = FlowMatchEulerDiscreteScheduler(shift=shift)
        made.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps))
        np.testing.assert_allclose(architecture.sigmas(4096, steps), made.sigmas.numpy(), rtol=0, atol=1e-6)


def test_components_are_recognised_and_not_taken_for_those_of_flux2() -> None:
    record = family("z-image")
    architecture = record.architecture
    transformer = architecture.transformer_config(None, record).shapes()
    narrow = {name: np.empty((2, *shape[1:2]), bool) for name, shape in transformer.items()}
    single = {name: value.shape for name, value in z_image_as_single_file(narrow).items()}
    autoencoder = AutoencoderConfig.from_dict(Z_AUTOENCODER).shapes()
    encoder = architecture.text_encoder_sizes(None, record).shapes(35)
    wide = {name: (3840, *shape[1:]) if "cap_embedder.1" in name else shape for name, shape in single.items()}
    for shapes, component in ((transformer, "transformer"), (wide, "transformer"), (autoencoder, "autoencoder")):
        fit = {name for name, each in FAMILIES.items() if recognise(shapes, each) == component}
        assert fit == {"z-image", "z-image-turbo"}, component
    assert {"klein-base-4b", "z-image"} <= {n for n, f in FAMILIES.items() if recognise(encoder, f)}
