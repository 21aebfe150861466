"""Adapters of FLUX 3 Image in the forms that other programs write, and in those that diffusers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.models.flux3.architecture import FLUX3
from stages.tuner.blockwise.backprop import model_forward
from tests.stages.models.flux3.test_transformer import given, ours, prepared, random_reference, theirs

LINEAR = "mode_blocks.image_cond.1.attn.to_out.0"
RANK, ALPHA = 2, 4.0


def pair(outputs: int = 6, inputs: int = 5) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(outputs)
    return draw.standard_normal((RANK, inputs), np.float32), draw.standard_normal((outputs, RANK), np.float32)


@pytest.mark.parametrize(
    ("key", "linear"),
    [
        (f"transformer.{LINEAR}.lora_{{}}.weight", LINEAR),
        (f"diffusion_model.{LINEAR}.lora_{{}}.weight", LINEAR),
        (f"base_model.model.{LINEAR}.lora_{{}}.weight", LINEAR),
        (f"{LINEAR}.lora_{{}}.default.weight", LINEAR),
        ("diffusion_model.content_mode_blocks.image_cond.1.attn_out.lora_{}.weight", LINEAR),
        ("lora_unet_content_mode_blocks_image_cond_1_attn_out.{}", LINEAR),
        ("lora_unet_mode_blocks_image_cond_1_attn_to_out_0.{}", LINEAR),
        ("lora_unet_content_mode_blocks_image_1_attn_out.{}", "mode_blocks.image.1.attn.to_out.0"),
        ("diffusion_model.txt_mode_blocks.0.mlp_out.lora_{}.weight", "txt_mode_blocks.0.ff.linear_out"),
        ("lora_unet_single_blocks_27_q_proj.{}", "single_transformer_blocks.27.attn.to_q"),
        ("diffusion_model.single_blocks.27.mlp_in.lora_{}.weight", "single_transformer_blocks.27.ff.linear_in"),
    ],
)
@pytest.mark.parametrize("alpha", [None, ALPHA])
def test_the_adapters_of_other_programs_are_read(key: str, linear: str, alpha: float | None, tmp_path: Path) -> None:
    (a, b), words = pair(), ("lora_down.weight", "lora_up.weight") if key.startswith("lora_unet") else ("A", "B")
    arrays = {key.format(words[0]): a, key.format(words[1]): b}
    if alpha is not None:
        arrays[key.partition(".lora_")[0].removesuffix(".{}") + ".alpha"] = np.array(alpha, np.float32)
    save_file(arrays, tmp_path / "lora.safetensors")
    read, scales = FLUX3.read_adapter(tmp_path / "lora.safetensors")
    assert scales == {linear: 1 if alpha is None else alpha / RANK}
    np.testing.assert_array_equal(np.array(read[f"{linear}.lora_A.weight"]), a)
    np.testing.assert_array_equal(np.array(read[f"{linear}.lora_B.weight"]), b)


def test_an_adapter_of_the_last_layer_exchanges_the_halves_of_its_rows(tmp_path: Path) -> None:
    a, b = pair()
    name = "diffusion_model.final_layer.image.adaLN_modulation.1"
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, tmp_path / "lora.safetensors")
    arrays, _ = FLUX3.read_adapter(tmp_path / "lora.safetensors")
    np.testing.assert_array_equal(np.array(arrays["norm_out.linear.lora_B.weight"]), np.concatenate([b[3:], b[:3]]))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    save_file({"lora_unet_double_blocks_0_img_mlp_0.lora_down.weight": pair()[0]}, tmp_path / "lora.safetensors")
    with pytest.raises(ValueError, match="names no linear of FLUX 3; is the adapter one of another model"):
        FLUX3.read_adapter(tmp_path / "lora.safetensors")


def test_an_adapter_that_diffusers_saved_is_read_and_in_both_our_styles_diffusers_predicts_the_same(tmp_path: Path) -> None:
    import torch
    from diffusers.loaders.lora_pipeline import Flux3LoraLoaderMixin
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    model: Any = random_reference()
    plain = ours(model)
    targets = ["to_q", "to_out.0", "linear_in", "linear_out"]
    config = LoraConfig(r=2, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    model.add_adapter(config)
    Flux3LoraLoaderMixin.save_lora_weights(
        tmp_path, get_peft_model_state_dict(model), transformer_lora_adapter_metadata=config.to_dict()
    )
    drawn = given((3, 4), (9,), ((2, 2),))
    case = drawn[0], drawn[1], np.array([0.6], np.float32), None, drawn[2]
    with torch.no_grad():
        expected, unadapted = (theirs(each, *case).numpy() for each in (model, random_reference()))
    assert np.abs(expected - unadapted).max() > 1e-2
    read = FLUX3.read_adapter(tmp_path / "pytorch_lora_weights.safetensors")
    prediction = np.array(model_forward(plain, read)(**prepared(*case[:2], case[2], case[2], case[4])))
    assert np.abs(prediction - expected).max() <= 1e-5 * np.abs(expected).max()
    for style, written in FLUX3.adapter_styles.items():
        file = tmp_path / f"{style}.safetensors"
        mx.save_safetensors(str(file), written(*read))
        again = random_reference()
        state, metadata = Flux3LoraLoaderMixin.lora_state_dict(str(file), return_lora_metadata=True)
        Flux3LoraLoaderMixin.load_lora_into_transformer(state, again, metadata=metadata)
        with torch.no_grad():
            found = theirs(again, *case).numpy()
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max(), style
