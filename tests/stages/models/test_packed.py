"""Weights that other tools have stored in 8 bits or fewer, against what their own routines unpack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from stages.models import weights
from stages.models.flux2.load import load_flux2
from stages.models.folders import locate
from stages.models.text.encoder import TextEncoder
from stages.text_to_image.families import TINY_TRANSFORMER, family
from tests import checkpoints

SIZES = {**TINY_TRANSFORMER, "joint_attention_dim": 96, "guidance_embeds": True}
TINY = family("tiny")


@pytest.fixture(scope="module")
def reference() -> Any:
    """A small transformer of diffusers with guidance embedding."""
    import torch
    from diffusers import Flux2Transformer2DModel

    torch.manual_seed(2)
    return Flux2Transformer2DModel(**SIZES).eval()


def loaded(path: Path) -> dict[str, mx.array]:
    """Return the weights that `load_flux2` reads, in float32, by diffusers name."""
    found: dict[str, mx.array] = {}
    load_flux2(path, TINY, mx.float32, lambda name, weight: found.setdefault(name, weight))
    return found


def torch_dtype(name: str) -> Any:
    import torch

    return {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


@pytest.mark.parametrize("spelling", ["diffusers", "", "model.diffusion_model."], ids=["diffusers", "bfl", "comfyui"])
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize(
    ("scales", "ending"), [("none", ""), ("tensor", "weight_scale"), ("row", "weight_scale"), ("tensor", "scale_weight")]
)
def test_fp8_weights_are_their_own_unpacked_values(
    reference: Any, tmp_path: Path, spelling: str, dtype: str, scales: str, ending: str
) -> None:
    from safetensors.torch import save_file

    plain = spelling == "diffusers"
    arrays = reference.state_dict() if plain else checkpoints.as_single_file(reference.state_dict(), spelling)
    stored, values = checkpoints.in_fp8(arrays, torch_dtype(dtype), scales, ending)
    save_file({key: value.contiguous() for key, value in stored.items()}, tmp_path / "model.safetensors")
    save_file({key: value.contiguous() for key, value in values.items()}, tmp_path / "plain.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    packed, dense = (loaded(tmp_path / f"{name}.safetensors") for name in ("model", "plain"))
    assert packed.keys() == dense.keys() == reference.state_dict().keys()
    for name, value in dense.items():
        np.testing.assert_array_equal(np.array(packed[name]), np.array(value), name)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("spelling", ["diffusers", "", "diffusion_model."])
def test_half_precision_files_of_every_spelling_hold_the_same_weights(
    reference: Any, tmp_path: Path, spelling: str, dtype: str
) -> None:
    from safetensors.torch import save_file

    halves = {key: value.to(torch_dtype(dtype)) for key, value in reference.state_dict().items()}
    given = halves if spelling == "diffusers" else checkpoints.as_single_file(halves, spelling)
    save_file({key: value.contiguous() for key, value in given.items()}, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    found = loaded(tmp_path / "m.safetensors")
    for name, value in halves.items():
        np.testing.assert_array_equal(np.array(found[name]), value.float().numpy(), name)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_text_encoder_that_mlx_lm_quantised_is_its_own_unpacked_values(tiny_weights: Path, tmp_path: Path, bits: int) -> None:
    source = tiny_weights / "text_encoder"
    settings = {"group_size": 32, "bits": bits}
    stored, values = {}, {}
    for key, value in mx.load(str(source / "model.safetensors")).items():
        stored[key] = values[key] = value
        if value.ndim == 2:
            parts = mx.quantize(value.astype(mx.bfloat16), **settings)
            stored |= dict(zip((key, key.replace("weight", "scales"), key.replace("weight", "biases")), parts, strict=True))
            values[key] = mx.dequantize(*parts, **settings).astype(mx.float32)
    words = []
    for name, arrays in (("packed", stored), ("plain", values)):
        (tmp_path / name).mkdir()
        config = json.loads((source / "config.json").read_text()) | ({"quantization": settings} if name == "packed" else {})
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        mx.save_safetensors(str(tmp_path / name / "model.safetensors"), arrays)
        words.append(next(TextEncoder(tmp_path / name, tiny_weights / "tokenizer", TINY, "float32").encode(["a cat"])).words)
    np.testing.assert_array_equal(*words)


def test_a_transformer_that_mflux_saved_is_read(reference: Any, tmp_path: Path) -> None:
    stored, values = {}, {}
    for key, tensor in reference.state_dict().items():
        value, name = mx.array(tensor.numpy()), key.replace("timestep_embedder.", "")
        name = name.replace("attn.to_out.0.", "attn.to_out.")
        stored[name] = values[key] = value
        if value.ndim == 2 and value.shape[-1] % 64 == 0:
            parts = mx.quantize(value, group_size=64, bits=8)
            stored |= dict(zip((name, name.replace("weight", "scales"), name.replace("weight", "biases")), parts, strict=True))
            values[key] = mx.dequantize(*parts, group_size=64, bits=8)
    without_guidance = {key: value for key, value in stored.items() if "guidance_embedder" not in key}
    mx.save_safetensors(str(tmp_path / "0.safetensors"), without_guidance)
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"guidance_embeds": False}))
    for name, value in loaded(tmp_path).items():
        np.testing.assert_array_equal(np.array(value), np.array(values[name].astype(mx.float32)), name)


SHAPES = {"a.weight": (4, 64)}


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"a.weight_scale": mx.ones(3)}, r"a\.weight_scale must be one number or one for each of 4 rows, got \(3,\)"),
        ({"a.weight_scale": mx.ones((4, 2))}, r"got \(4, 2\)"),
        ({"a.weight_scale": mx.ones(1, mx.int32)}, "must be one number"),
        ({"a.weight_scale_2": mx.ones(1)}, r"quantised in a way that is not read \(a\.weight_scale_2\)"),
        ({"a.weight_scale_inv": mx.ones(1)}, "not read"),
        ({"b.weight_scale": mx.ones(1)}, r"holds b\.weight_scale, the scale of a weight that is not in 8 bits"),
        ({"a.weight_scale": mx.array(float("nan"))}, "infinite or not a number"),
    ],
)
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_scales_that_do_not_fit_are_one_line(arrays: dict[str, mx.array], said: str, dtype: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    stored = {"a.weight": torch.ones(4, 64).to(torch_dtype(dtype))}
    save_file(stored | {name: torch.tensor(np.array(value)) for name, value in arrays.items()}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=said) as error:
        weights.load_component(tmp_path, SHAPES)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changed", "settings", "said"),
    [
        ({"a.scales": None}, {}, r"lacks a\.scales, which a layer quantised by MLX has"),
        ({"a.scales": mx.ones((4, 3))}, {}, "a must be quantised by MLX in groups of 64"),
        ({"a.biases": mx.ones((3, 1))}, {}, "a must be quantised by MLX"),
        ({"a.weight": mx.zeros((4, 7), mx.uint32)}, {}, "a must be quantised by MLX"),
        ({}, {"bits": 4}, "a must be quantised by MLX"),
        ({}, {"group_size": 48}, r"group_size in \(32, 64, 128\)"),
        ({}, {"bits": 7}, "bits in"),
        ({}, {"mode": "mxfp4"}, "must be MLX's affine one"),
        ({}, [1], "must be MLX's affine one"),
    ],
)
def test_a_quantised_layer_whose_parts_contradict_each_other_is_one_line(
    changed: dict[str, Any], settings: Any, said: str, tmp_path: Path
) -> None:
    parts = dict(zip(("a.weight", "a.scales", "a.biases"), mx.quantize(mx.ones((4, 64)), group_size=64, bits=8), strict=True))
    mx.save_safetensors(str(tmp_path / "m.safetensors"), {k: v for k, v in (parts | changed).items() if v is not None})
    (tmp_path / "config.json").write_text(json.dumps({"quantization": settings}))
    with pytest.raises(ValueError, match=said) as error:
        weights.load_component(tmp_path, SHAPES)
    assert "\n" not in str(error.value)


def test_a_single_file_is_found_with_its_precision_in_its_name(tmp_path: Path) -> None:
    klein = family("klein-4b")
    for name in ("flux-2-klein-base-4b.safetensors", "flux-2-klein-4b-nvfp4.safetensors", "qwen_3_4b_fp8_mixed.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"looked for transformer/, flux-2-klein-4b\.safetensors"):
        locate(tmp_path, "transformer", klein)
    (tmp_path / "flux-2-klein-4b-fp8.safetensors").touch()
    assert locate(tmp_path, "transformer", klein).name == "flux-2-klein-4b-fp8.safetensors"
    assert locate(tmp_path, "text_encoder", klein).name == "qwen_3_4b_fp8_mixed.safetensors"
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "Qwen3-4B-Q4_K_M.gguf").touch()
    assert locate(tmp_path / "gguf", "text_encoder", klein).name == "Qwen3-4B-Q4_K_M.gguf"
    (tmp_path / "flux-2-klein-4b_bf16.safetensors").touch()
    with pytest.raises(ValueError, match=r"has flux-2-klein-4b-fp8\.\w+ and flux-2-klein-4b_bf16\.\w+: remove one"):
        locate(tmp_path, "transformer", klein)
