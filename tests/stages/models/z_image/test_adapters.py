"""Adapters of Z-Image with fused Linears, and beside diffusers; test_adapter_names.py has the names that other programs write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.models.z_image.architecture import Z_IMAGE
from stages.tuner.blockwise.backprop import model_forward
from tests.checkpoints import save_lora
from tests.stages.models.test_adapter_names import pair
from tests.stages.models.z_image.test_transformer import folded, given, levelled, ours, random_reference, theirs


@pytest.mark.parametrize("key", ["lora_unet_layers_0_attention_qkv", "diffusion_model.layers.0.attention.qkv"])
def test_an_adapter_of_q_k_and_v_in_one_is_taken_apart(key: str, tmp_path: Path) -> None:
    (a, b), words = pair(18), ("down", "up") if key.startswith("lora_unet") else ("A", "B")
    save_file({f"{key}.lora_{words[0]}.weight": a, f"{key}.lora_{words[1]}.weight": b}, tmp_path / "lora.safetensors")
    arrays, scales = Z_IMAGE.read_adapter(tmp_path / "lora.safetensors")
    assert list(scales) == [f"layers.0.attention.{part}" for part in ("to_q", "to_k", "to_v")]
    deltas = [scale * arrays[f"{name}.lora_B.weight"] @ arrays[f"{name}.lora_A.weight"] for name, scale in scales.items()]
    np.testing.assert_allclose(np.concatenate(deltas), b @ a, rtol=1e-5)


def test_an_adapter_that_changes_norms_or_biases_is_refused_in_one_line(tmp_path: Path) -> None:
    (a, b), stem = pair(), "diffusion_model.layers.0.attention.to_q"
    for key in ("layers.0.attention.q_norm.diff", "final_layer.linear.diff_b"):
        whole = {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b, f"diffusion_model.{key}": np.ones(6, np.float32)}
        save_file(whole, tmp_path / "lora.safetensors")
        said = f"diffusion_model.{key} adds to a whole weight or bias of Z-Image, as no LoRA, DoRA or LoKr does"
        with pytest.raises(ValueError, match=said):
            Z_IMAGE.read_adapter(tmp_path / "lora.safetensors")


def test_an_adapter_that_diffusers_saved_is_read(tmp_path: Path) -> None:
    import torch
    from diffusers import ZImagePipeline
    from peft import LoraConfig

    model: Any = random_reference()
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["to_q", "to_out.0", "w2"], init_lora_weights=False)
    plain = ours(model)
    model.add_adapter(config)
    saved = save_lora(ZImagePipeline, tmp_path, model, config)
    x_BCHW, texts = given((3, 4), (9,))
    with torch.no_grad():
        expected = folded(theirs(model, x_BCHW, texts, np.array([0.6], np.float32)).numpy())
    forward = model_forward(plain, Z_IMAGE.read_adapter(saved))
    got = forward(x_BLC=mx.array(folded(x_BCHW)), size=(3, 4), ctx_BTJ=levelled(texts)[0], sigma_B=mx.array([0.6]))
    assert np.abs(np.array(got) - expected).max() <= 1e-5 * np.abs(expected).max()
