"""Adapters by the names that other programs write. tests/pipeline/commands has more of FLUX.2's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.text_to_image.families import family

RANK, ALPHA = 2, 4.0
OUT = "mode_blocks.image_cond.1.attn.to_out.0"
Q, REFINER = "layers.0.attention.to_q", "noise_refiner.1.attention.to_out.0"
KEYS = {  # family -> (name of an array, with {} for what it is; the Linear)
    "tiny": (
        ("lora_unet_transformer_blocks_0_attn_to_q.{}", "transformer_blocks.0.attn.to_q"),
        ("transformer.transformer_blocks.0.attn.to_out.lora_{}.weight", "transformer_blocks.0.attn.to_out.0"),  # mflux
        ("diffusion_model.double_blocks.0.img_attn.proj.lora_{}.weight", "transformer_blocks.0.attn.to_out.0"),
        ("diffusion_model.single_blocks.1.linear2.lora_{}.weight", "single_transformer_blocks.1.attn.to_out"),
    ),
    "flux3-tiny": (
        (f"transformer.{OUT}.lora_{{}}.weight", OUT),
        (f"diffusion_model.{OUT}.lora_{{}}.weight", OUT),
        (f"base_model.model.{OUT}.lora_{{}}.weight", OUT),
        (f"{OUT}.lora_{{}}.default.weight", OUT),
        ("transformer.mode_blocks.image_cond.1.attn.to_out.lora_{}.weight", OUT),
        ("diffusion_model.content_mode_blocks.image_cond.1.attn_out.lora_{}.weight", OUT),
        ("lora_unet_content_mode_blocks_image_cond_1_attn_out.{}", OUT),
        ("lora_unet_mode_blocks_image_cond_1_attn_to_out_0.{}", OUT),
        ("lora_unet_content_mode_blocks_image_1_attn_out.{}", "mode_blocks.image.1.attn.to_out.0"),
        ("diffusion_model.txt_mode_blocks.0.mlp_out.lora_{}.weight", "txt_mode_blocks.0.ff.linear_out"),
        ("lora_unet_single_blocks_27_q_proj.{}", "single_transformer_blocks.27.attn.to_q"),
        ("diffusion_model.single_blocks.27.mlp_in.lora_{}.weight", "single_transformer_blocks.27.ff.linear_in"),
    ),
    "z-image-tiny": (
        (f"transformer.{Q}.lora_{{}}.weight", Q),
        (f"diffusion_model.{Q}.lora_{{}}.weight", Q),
        (f"{Q}.lora_{{}}.default.weight", Q),
        ("lora_unet_layers_0_attention_to_q.{}", Q),
        ("lora_unet_noise_refiner_1_attention_to_out_0.{}", REFINER),
        ("lora_unet_noise_refiner_1_attention_out.{}", REFINER),
        ("diffusion_model.noise_refiner.1.attention.out.lora_{}.weight", REFINER),
        ("diffusion_model.layers.0.adaLN_modulation.0.lora_{}.weight", "layers.0.adaLN_modulation.0"),
    ),
}


def pair(outputs: int = 6, inputs: int = 5) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(outputs)
    return draw.standard_normal((RANK, inputs), np.float32), draw.standard_normal((outputs, RANK), np.float32)


@pytest.mark.parametrize(("name", "key", "linear"), [(name, *each) for name, keys in KEYS.items() for each in keys])
@pytest.mark.parametrize("alpha", [None, ALPHA])
def test_the_adapters_of_other_programs_are_read(name: str, key: str, linear: str, alpha: float | None, tmp_path: Path) -> None:
    (a, b), words = pair(), ("lora_down.weight", "lora_up.weight") if key.startswith("lora_unet") else ("A", "B")
    arrays = {key.format(words[0]): a, key.format(words[1]): b}
    if alpha is not None:
        arrays[key.partition(".lora_")[0].removesuffix(".{}") + ".alpha"] = np.array(alpha, np.float32)
    save_file(arrays, tmp_path / "lora.safetensors")
    read, scales = family(name).architecture.read_adapter(tmp_path / "lora.safetensors")
    assert scales == {linear: 1 if alpha is None else alpha / RANK}
    np.testing.assert_array_equal(np.array(read[f"{linear}.lora_A.weight"]), a)
    np.testing.assert_array_equal(np.array(read[f"{linear}.lora_B.weight"]), b)


@pytest.mark.parametrize("name", KEYS)
def test_an_adapter_of_another_model_or_without_tensors_is_refused_and_not_drawn_as_the_base(name: str, tmp_path: Path) -> None:
    other = {"lora_unet_down_blocks_0_attn1_to_q.lora_down.weight": pair()[0]}
    said = r"names no linear of (FLUX.2|FLUX 3|Z-Image); is the adapter one of another model"
    for arrays, message in ((other, said), ({}, r"lora\.safetensors holds no LoRA, DoRA or LoKr")):
        save_file(arrays, tmp_path / "lora.safetensors")
        with pytest.raises(ValueError, match=message):
            family(name).architecture.read_adapter(tmp_path / "lora.safetensors")


@pytest.mark.parametrize("key", ["lora_unet_layers_0_attention_qkv", "diffusion_model.layers.0.attention.qkv"])
def test_an_adapter_of_z_images_q_k_and_v_in_one_is_taken_apart(key: str, tmp_path: Path) -> None:
    (a, b), words = pair(18), ("down", "up") if key.startswith("lora_unet") else ("A", "B")
    save_file({f"{key}.lora_{words[0]}.weight": a, f"{key}.lora_{words[1]}.weight": b}, tmp_path / "lora.safetensors")
    arrays, scales = family("z-image-tiny").architecture.read_adapter(tmp_path / "lora.safetensors")
    assert list(scales) == [f"layers.0.attention.{part}" for part in ("to_q", "to_k", "to_v")]
    deltas = [scale * arrays[f"{name}.lora_B.weight"] @ arrays[f"{name}.lora_A.weight"] for name, scale in scales.items()]
    np.testing.assert_allclose(np.concatenate(deltas), b @ a, rtol=1e-5)


def test_an_adapter_of_flux_3s_last_layer_exchanges_the_halves_of_its_rows(tmp_path: Path) -> None:
    (a, b), name = pair(), "diffusion_model.final_layer.image.adaLN_modulation.1"
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, tmp_path / "lora.safetensors")
    arrays, _ = family("flux3-tiny").architecture.read_adapter(tmp_path / "lora.safetensors")
    np.testing.assert_array_equal(np.array(arrays["norm_out.linear.lora_B.weight"]), np.concatenate([b[3:], b[:3]]))


@pytest.mark.parametrize("key", ["layers.0.attention.q_norm.diff", "final_layer.linear.diff_b"])
def test_an_adapter_that_changes_norms_or_biases_is_refused_in_one_line(key: str, tmp_path: Path) -> None:
    (a, b), stem = pair(), f"diffusion_model.{Q}"
    whole = {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b, f"diffusion_model.{key}": np.ones(6, np.float32)}
    save_file(whole, tmp_path / "lora.safetensors")
    said = f"diffusion_model.{key} adds to a whole weight or bias of Z-Image, as no LoRA, DoRA or LoKr does"
    with pytest.raises(ValueError, match=said):
        family("z-image-tiny").architecture.read_adapter(tmp_path / "lora.safetensors")
