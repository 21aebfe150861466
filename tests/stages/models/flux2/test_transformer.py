"""The FLUX.2 transformer against diffusers' own, at tiny sizes in float32."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from stages import kernels
from stages.models import layers
from stages.models.attention import plain_linear
from stages.models.flux2.transformer import Flux2, Flux2Config, image_ids, text_ids
from tests.checkpoints import random_model

SIZE = (3, 5)  # latent height and width
TEXT = 7
SIGMAS = np.array([0.9373, 0.1], np.float32)
GUIDANCE = np.array([4.0, 1.0], np.float32)


@pytest.fixture(scope="module", params=[False, True], ids=["klein", "dev"])
def reference(request: pytest.FixtureRequest) -> Any:
    """A random transformer by diffusers, without and with a guidance embedding."""
    from diffusers import Flux2Transformer2DModel

    sizes = {"num_layers": 2, "num_single_layers": 3, "num_attention_heads": 2, "attention_head_dim": 24}
    sizes |= {"in_channels": 16, "joint_attention_dim": 20, "timestep_guidance_channels": 32, "axes_dims_rope": (4, 8, 8, 4)}
    return random_model(Flux2Transformer2DModel, **sizes, guidance_embeds=request.param)


def ours(reference: Any, dtype: mx.Dtype = mx.float32) -> Flux2:
    arrays = {name: mx.array(tensor.numpy()).astype(dtype) for name, tensor in reference.state_dict().items()}
    return Flux2(Flux2Config.from_dict(reference.config), arrays)


def given(batch: int = 2) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((batch, SIZE[0] * SIZE[1], 16), np.float32)
    ctx = draw.standard_normal((batch, TEXT, 20), np.float32)
    return {"x": x, "ctx": ctx, "timesteps": SIGMAS[:batch], "guidance": GUIDANCE[:batch]}


def run(model: Flux2, x: Any, ctx: Any, timesteps: Any, guidance: Any, linear_for: Any = None) -> mx.array:
    arrays = mx.array(x), image_ids(*SIZE), mx.array(ctx), text_ids(TEXT), mx.array(timesteps), mx.array(guidance)
    return model(*arrays, linear_for=linear_for)


def theirs(model: Any, x: Any, ctx: Any, timesteps: Any, guidance: Any) -> Any:
    import torch

    return model(
        hidden_states=torch.as_tensor(x),
        encoder_hidden_states=torch.as_tensor(ctx),
        timestep=torch.as_tensor(timesteps),
        guidance=torch.as_tensor(guidance) if model.config.guidance_embeds else None,
        img_ids=torch.as_tensor(image_ids(*SIZE)),
        txt_ids=torch.as_tensor(text_ids(TEXT)),
    ).sample


@pytest.fixture(params=["one image on a CPU", "one image on a GPU", "two images"])
def batch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(kernels, "compiles", lambda: request.param.endswith("GPU"))
    return 2 if request.param == "two images" else 1


def test_velocity_and_gradient_are_those_of_diffusers(reference: Any, batch: int) -> None:
    import torch

    inputs = given(batch)
    at = inputs["timesteps"], inputs["guidance"]
    x, ctx = (torch.tensor(inputs[name], requires_grad=True) for name in ("x", "ctx"))
    expected = theirs(reference, x, ctx, *at)
    expected.square().sum().backward()
    model = ours(reference)
    got = np.array(run(model, **inputs))
    assert got.std() > 0.1
    np.testing.assert_allclose(got, expected.detach().numpy(), rtol=0, atol=1e-5)
    loss = lambda x, ctx: mx.square(run(model, x, ctx, *at)).sum()  # noqa: E731
    grads = mx.grad(loss, argnums=(0, 1))(mx.array(inputs["x"]), mx.array(inputs["ctx"]))
    for found, wanted in zip(grads, (x.grad, ctx.grad), strict=True):
        scale = float(wanted.abs().max())
        np.testing.assert_allclose(np.array(found) / scale, wanted.numpy() / scale, rtol=0, atol=1e-4)


def test_bfloat16_weights_keep_the_whole_stream_in_bfloat16_and_do_not_round_sigma(reference: Any) -> None:
    model, seen = ours(reference, mx.bfloat16), set()

    def linear(name: str, weight: Any, x: mx.array) -> mx.array:
        y = plain_linear(name, weight, x)
        seen.update({x.dtype, y.dtype})
        return y

    inputs = given()
    at = (mx.array(inputs["x"]), image_ids(*SIZE), mx.array(inputs["ctx"]), text_ids(TEXT), mx.array(SIGMAS), mx.array(GUIDANCE))
    h, shared = model.enter(*at)
    for block in model.blocks:
        seen |= {leaf.dtype for _, leaf in tree_flatten(h)}
        h = model.block(block.kind)(block.weights, h, shared, linear)
    assert seen | {h.dtype, model.leave(h, shared).dtype} == {mx.bfloat16}
    assert {name for name, value in tree_flatten(shared) if value.dtype == mx.float32} == {"rope.0", "rope.1"}
    assert layers.rotate(mx.zeros((1, TEXT + 15, 2, 24), mx.bfloat16), *shared["rope"]).dtype == mx.bfloat16
    exact, rounded = run(ours(reference), **inputs), run(model, **inputs).astype(mx.float32)
    assert mx.abs(exact - rounded).max() < 0.05 * mx.abs(exact).max()
    near = model._embed("timestep", mx.array([0.9373, 0.9363]))  # in bfloat16 both would be 936
    assert mx.abs(near[0] - near[1]).max() > 0
