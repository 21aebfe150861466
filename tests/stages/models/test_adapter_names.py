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
