"""Adapters of FLUX 3 Image beside diffusers; test_adapter_names.py has the names that other programs write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from stages.models.flux3.architecture import FLUX3
from stages.tuner.blockwise.backprop import model_forward
from tests.checkpoints import save_lora
from tests.stages.models.flux3.test_transformer import given, ours, prepared, random_reference, theirs
from tests.stages.models.test_adapter_names import pair


def test_an_adapter_of_the_last_layer_exchanges_the_halves_of_its_rows(tmp_path: Path) -> None:
    a, b = pair()
    name = "diffusion_model.final_layer.image.adaLN_modulation.1"
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, tmp_path / "lora.safetensors")
    arrays, _ = FLUX3.read_adapter(tmp_path / "lora.safetensors")
    np.testing.assert_array_equal(np.array(arrays["norm_out.linear.lora_B.weight"]), np.concatenate([b[3:], b[:3]]))


def test_an_adapter_that_diffusers_saved_is_read(tmp_path: Path) -> None:
    import torch
    from diffusers.loaders.lora_pipeline import Flux3LoraLoaderMixin
    from peft import LoraConfig

    model: Any = random_reference()
    plain = ours(model)
    targets = ["to_q", "to_out.0", "linear_in", "linear_out"]
    config = LoraConfig(r=2, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    model.add_adapter(config)
    saved = save_lora(Flux3LoraLoaderMixin, tmp_path, model, config)
    drawn = given((3, 4), (9,), ((2, 2),))
    case = drawn[0], drawn[1], np.array([0.6], np.float32), None, drawn[2]
    with torch.no_grad():
        expected, unadapted = (theirs(each, *case).numpy() for each in (model, random_reference()))
    assert np.abs(expected - unadapted).max() > 1e-2
    read = FLUX3.read_adapter(saved)
    prediction = np.array(model_forward(plain, read)(**prepared(*case[:2], case[2], case[2], case[4])))
    assert np.abs(prediction - expected).max() <= 1e-5 * np.abs(expected).max()
