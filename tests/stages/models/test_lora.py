"""LoRAs of FLUX 3 Image and Z-Image as PEFT computes them in diffusers' models, and as diffusers saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from stages import kernels
from stages.text_to_image.families import family
from stages.tuner.blockwise.backprop import loss_and_grads, model_forward
from stages.tuner.diffusion import mse
from tests.checkpoints import save_lora, with_lora
from tests.stages.models.flux3 import test_transformer as flux3
from tests.stages.models.z_image import test_transformer as z_image

MODULES: dict[str, Any] = {"flux3-tiny": flux3, "z-image-tiny": z_image}
TARGETS = {
    "flux3-tiny": ("to_q", "to_out.0", "linear_in", "linear_out"),
    "z-image-tiny": ("to_q", "to_out.0", "w1", "w2", "adaLN_modulation.0"),
}


def sides(name: str, texts: tuple[int, ...], beside: Any = ()) -> tuple[dict[str, Any], Callable[[Any], Any], Any]:
    """(Our arguments, the velocity of a model of diffusers, and what brings that into our order)."""
    size = (3, 5)
    if name == "flux3-tiny":
        x_BChw, words, shown = flux3.given(size, texts, beside)
        given = x_BChw, words, flux3.SIGMAS[: len(texts)], flux3.TARGETS[: len(texts)], shown
        return flux3.prepared(*given), lambda model: flux3.theirs(model, *given), np.asarray
    x_BCHW, words = z_image.given(size, texts)
    text_BTJ, tokens_B = z_image.levelled(words)
    sigmas = z_image.SIGMAS[: len(texts)]
    ours = {"x_BLC": mx.array(z_image.folded(x_BCHW)), "size": size, "ctx_BTJ": text_BTJ, "sigma_B": mx.array(sigmas)}
    return ours | {"tokens_B": tokens_B}, lambda model: z_image.theirs(model, x_BCHW, words, sigmas), z_image.folded


@pytest.mark.parametrize(
    ("name", "plan", "texts", "sizes", "beside"),
    [
        ("flux3-tiny", "blocks", (7, 20), {"flow_map": True}, ()),
        ("flux3-tiny", "blocks", (7, 20), {}, ((2, 4),)),
        ("flux3-tiny", "whole", (7, 20), {"flow_map": True}, ((2, 4),)),
        ("z-image-tiny", "blocks", (7, 20), {}, ()),
        ("z-image-tiny", "whole", (7, 20), {}, ()),
        ("z-image-tiny", "blocks", (7,), {}, ()),  # as on a GPU
    ],
)
def test_the_loss_and_the_gradients_of_a_lora_are_those_of_pytorch(
    name: str, plan: str, texts: Any, sizes: Any, beside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    if len(texts) == 1:
        monkeypatch.setattr(kernels, "compiles", lambda: True)  # chooses the fused norm; nothing is compiled
    inputs, predict, ordered = sides(name, texts, beside)
    reference = MODULES[name].random_reference(**sizes)
    model = flux3.ours(reference, bool(beside)) if name == "flux3-tiny" else z_image.ours(reference)
    names = [linear for linear in model.linears() if linear.endswith(TARGETS[name])]
    adapted, expected = with_lora(MODULES[name].random_reference(**sizes), names)
    velocity = predict(adapted)
    target = np.random.default_rng(1).standard_normal(velocity.shape, np.float32)
    loss = (velocity - torch.tensor(target)).square().mean()
    loss.backward()
    arrays = {each: mx.array(tensor.detach().numpy()) for each, tensor in expected.items()}
    wanted = mx.array(ordered(target))
    losses_B, grads = loss_and_grads(model, arrays, dict.fromkeys(names, 2.0), inputs, lambda v: mse(v, wanted), plan)
    assert abs(losses_B.mean().item() - loss.item()) <= 1e-5 * loss.item()
    assert set(grads) == set(expected) and any("mode_blocks.image_cond." in each for each in grads) == bool(beside)
    for each, tensor in expected.items():
        apart = np.linalg.norm(np.array(grads[each]) - tensor.grad.numpy())
        assert apart <= 1e-4 * np.linalg.norm(tensor.grad.numpy()), each


@pytest.mark.parametrize(("name", "beside"), [("flux3-tiny", ((2, 2),)), ("z-image-tiny", ())])
def test_an_adapter_that_diffusers_saved_is_read(name: str, beside: Any, tmp_path: Path) -> None:
    import torch
    from diffusers.loaders import lora_pipeline
    from peft import LoraConfig

    model: Any = MODULES[name].random_reference()
    plain = MODULES[name].ours(model)
    inputs, predict, ordered = sides(name, (9,), beside)
    with torch.no_grad():
        unadapted = predict(model).numpy()
        config = LoraConfig(r=2, lora_alpha=6, target_modules=list(TARGETS[name][:3]), init_lora_weights=False)
        model.add_adapter(config)
        expected = predict(model).numpy()
    assert np.abs(expected - unadapted).max() > 1e-2
    mixin = {"flux3-tiny": "Flux3LoraLoaderMixin", "z-image-tiny": "ZImageLoraLoaderMixin"}[name]
    saved = save_lora(getattr(lora_pipeline, mixin), tmp_path, model, config)
    got = np.array(model_forward(plain, family(name).architecture.read_adapter(saved))(**inputs))
    assert np.abs(got - ordered(expected)).max() <= 1e-5 * np.abs(expected).max()
