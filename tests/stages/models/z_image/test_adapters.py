"""Adapters of Z-Image in the forms that other programs write, and in those that diffusers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.models.z_image.architecture import Z_IMAGE

LINEAR = "layers.0.attention.to_q"
OUT = "noise_refiner.1.attention.to_out.0"
PARTS = [f"layers.0.attention.{part}" for part in ("to_q", "to_k", "to_v")]
RANK, ALPHA = 2, 4.0


def pair(outputs: int = 6, inputs: int = 5) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(outputs)
    return draw.standard_normal((RANK, inputs), np.float32), draw.standard_normal((outputs, RANK), np.float32)


def deltas(path: Path) -> dict[str, np.ndarray]:
    arrays, scales = Z_IMAGE.read_adapter(path)
    product = {name: np.array(arrays[f"{name}.lora_B.weight"] @ arrays[f"{name}.lora_A.weight"]) for name in scales}
    return {name: scale * product[name] for name, scale in scales.items()}


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        (f"transformer.{LINEAR}.lora_{{}}.weight", LINEAR),
        (f"diffusion_model.{LINEAR}.lora_{{}}.weight", LINEAR),
        (f"{LINEAR}.lora_{{}}.default.weight", LINEAR),
        ("lora_unet_layers_0_attention_to_q.{}", LINEAR),
        ("lora_unet_noise_refiner_1_attention_to_out_0.{}", OUT),
        ("lora_unet_noise_refiner_1_attention_out.{}", OUT),
        ("diffusion_model.noise_refiner.1.attention.out.lora_{}.weight", OUT),
        ("diffusion_model.layers.0.adaLN_modulation.0.lora_{}.weight", "layers.0.adaLN_modulation.0"),
    ],
)
@pytest.mark.parametrize("alpha", [None, ALPHA])
def test_the_adapters_of_other_programs_are_read(key: str, ours: str, alpha: float | None, tmp_path: Path) -> None:
    (a, b), words = pair(), ("lora_down.weight", "lora_up.weight") if key.startswith("lora_unet") else ("A", "B")
    arrays = {key.format(words[0]): a, key.format(words[1]): b}
    if alpha is not None:
        arrays[key.partition(".lora_")[0].removesuffix(".{}") + ".alpha"] = np.array(alpha, np.float32)
    save_file(arrays, tmp_path / "lora.safetensors")
    ((name, delta),) = deltas(tmp_path / "lora.safetensors").items()
    assert name == ours
    np.testing.assert_allclose(delta, (1 if alpha is None else alpha / RANK) * b @ a, rtol=1e-5)


@pytest.mark.parametrize("key", ["lora_unet_layers_0_attention_qkv", "diffusion_model.layers.0.attention.qkv"])
def test_an_adapter_of_q_k_and_v_in_one_is_taken_apart(key: str, tmp_path: Path) -> None:
    (a, b), words = pair(18), ("down", "up") if key.startswith("lora_unet") else ("A", "B")
    save_file(
        {f"{key}.lora_{word}.weight": value for word, value in zip(words, (a, b), strict=True)}, tmp_path / "lora.safetensors"
    )
    found = deltas(tmp_path / "lora.safetensors")
    assert list(found) == PARTS
    np.testing.assert_allclose(np.concatenate(list(found.values())), b @ a, rtol=1e-5)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    save_file({"lora_unet_double_blocks_0_img_mlp_0.lora_down.weight": pair()[0]}, tmp_path / "lora.safetensors")
    with pytest.raises(ValueError, match="names no linear of Z-Image; is the adapter one of another model"):
        Z_IMAGE.read_adapter(tmp_path / "lora.safetensors")


@pytest.mark.parametrize("key", ["layers.0.attention.q_norm.diff", "final_layer.linear.diff_b"])
def test_an_adapter_that_changes_norms_or_biases_is_refused_in_one_line(key: str, tmp_path: Path) -> None:
    (a, b), stem = pair(), f"diffusion_model.{LINEAR}"
    whole = {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b, f"diffusion_model.{key}": np.ones(6, np.float32)}
    save_file(whole, tmp_path / "lora.safetensors")
    said = f"diffusion_model.{key} adds to a whole weight or bias of Z-Image, as no LoRA, DoRA or LoKr does"
    with pytest.raises(ValueError, match=said):
        Z_IMAGE.read_adapter(tmp_path / "lora.safetensors")


def test_an_adapter_that_diffusers_saved_is_read(tmp_path: Path) -> None:
    import torch
    from diffusers import ZImagePipeline
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    from tests.stages.models.z_image.test_transformer import folded, given, levelled, ours, random_reference, theirs

    model: Any = random_reference()
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["to_q", "to_out.0", "w2"], init_lora_weights=False)
    plain = ours(model)
    model.add_adapter(config)
    ZImagePipeline.save_lora_weights(
        tmp_path, get_peft_model_state_dict(model), transformer_lora_adapter_metadata=config.to_dict()
    )
    x_BCHW, texts = given((3, 4), (9,))
    with torch.no_grad():
        expected = folded(theirs(model, x_BCHW, texts, np.array([0.6], np.float32)).numpy())
    from stages.tuner.blockwise.backprop import model_forward

    forward = model_forward(plain, Z_IMAGE.read_adapter(tmp_path / "pytorch_lora_weights.safetensors"))
    got = forward(x_BLC=mx.array(folded(x_BCHW)), size=(3, 4), ctx_BTJ=levelled(texts)[0], sigma_B=mx.array([0.6]))
    assert np.abs(np.array(got) - expected).max() <= 1e-5 * np.abs(expected).max()
