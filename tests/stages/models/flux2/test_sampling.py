"""Noise levels and steps against diffusers' scheduler, as its klein pipeline sets it up."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from stages.models import sampling
from stages.models.flux2.sampling import sigmas
from stages.models.flux2.transformer import inputs


def scheduler(tokens: int, steps: int) -> Any:
    """diffusers' scheduler, ready to step, the way the klein pipeline does it."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu, retrieve_timesteps

    made = FlowMatchEulerDiscreteScheduler(
        shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096
    )
    mu = compute_empirical_mu(image_seq_len=tokens, num_steps=steps)
    retrieve_timesteps(made, steps, "cpu", sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    made.set_begin_index(0)
    return made


@pytest.mark.parametrize("tokens", [16, 4096, 4300, 4301, 9216])
def test_the_noise_levels_are_those_of_diffusers(tokens: int) -> None:
    for steps in (1, 4, 50):
        np.testing.assert_allclose(sigmas(tokens, steps), scheduler(tokens, steps).sigmas.numpy(), rtol=0, atol=1e-6)


def test_a_bfloat16_velocity_leaves_the_latent_in_float32() -> None:
    steps = list(sampling.euler(lambda x, *levels: x.astype(mx.bfloat16), sampling.noise(0, (4,)), sigmas(4, 3)))
    assert [x.dtype for x in steps] == [mx.float32] * 3


def test_noise_depends_on_seed_and_shape_alone() -> None:
    noise_BCHW = np.array(sampling.noise(7, (1, 16, 32, 32)))
    np.testing.assert_array_equal(noise_BCHW, np.array(sampling.noise(7, (1, 16, 32, 32))))
    assert not np.array_equal(noise_BCHW, np.array(sampling.noise(8, (1, 16, 32, 32))))
    assert abs(noise_BCHW.mean()) < 0.05 and abs(noise_BCHW.std() - 1) < 0.05
    np.testing.assert_allclose(noise_BCHW.ravel()[:3], [-0.5023736, 0.5068453, 2.0193486], atol=1e-7)  # on every machine


def test_a_guidance_of_one_is_the_prompt_alone_and_more_extrapolates() -> None:
    texts = mx.array([[[1.0, 2.0]]]), mx.array([[[0.0, 3.0]]])
    for large in (1, 64):  # both passes as one batch, and one after the other
        for guidance, wanted in ((1.0, [1.0, 2.0]), (4.0, [4.0, -1.0])):
            predict = lambda ctx_BTJ, x_BLC, **_: mx.broadcast_to(ctx_BTJ, (len(ctx_BTJ), *x_BLC.shape[1:]))  # noqa: E731
            velocity = sampling.velocity_function(inputs, None, (large, large), *texts, guidance, predict)
            assert velocity(mx.zeros((1, 2, large, large)), 0.5, 0.4)[0, :, 0, 0].tolist() == wanted
