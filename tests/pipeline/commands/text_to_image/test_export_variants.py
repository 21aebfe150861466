"""Every variant exported: diffusers gives the output of the merged weights, and what is read again is the same."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from pipeline.commands.text_to_image.export import STYLES, write_adapter
from stages.models.adapters import A, B
from stages.models.flux2.architecture import FLUX2
from stages.models.weights import read_file
from stages.text_to_image.families import family
from stages.tuner import checkpoint
from stages.tuner.adapters import lora
from stages.tuner.adapters.targets import adapter_metadata, fresh_adapter, select_targets, target_scales
from tests import checkpoints
from tests.pipeline.commands.text_to_image.reference import BLOCKS, forward, through_diffusers, tiny_transformer
from tests.stages.tuner.adapters.variants import merged_weights

TINY = family("tiny")
VARIANTS = {
    "rslora": {"rank": 4, "rslora": True, "ranks": {"ff.*": 2}},
    "dora": {"rank": 4, "variant": "dora", "ranks": {"attn.to_k": 2, "ff_context.*": 0}},
    "lokr": {"rank": 2, "variant": "lokr", "factor": 4, "ranks": {"ff.linear_in": 3}},
    "whole lokr": {"rank": 1000, "variant": "lokr", "factor": 4},
    "square lokr": {"rank": 1, "variant": "lokr"},
    "orthogonal": {"rank": 4, "orthogonal": True, "ranks": {"ff.*": 2}},
}


@pytest.fixture(scope="module")
def transformer() -> Any:
    return tiny_transformer()


def trained_variant(path: Path, transformer: Any, variant: str) -> tuple[dict[str, mx.array], dict[str, float]]:
    shapes = {name: tuple(transformer.get_submodule(name).weight.shape) for name in BLOCKS}
    targets = select_targets(shapes, ["*"], alpha=6.0, **VARIANTS[variant])
    bases = {name: mx.array(transformer.get_submodule(name).weight.detach().numpy()) for name in shapes}
    arrays = fresh_adapter(targets, 0, bases)
    for i, (key, value) in enumerate(arrays.items()):
        noise = mx.random.normal(value.shape, key=mx.random.key(i))
        arrays[key] = value * (1 + 0.2 * noise) if key.endswith(lora.MAGNITUDE) else 0.2 * noise
    arrays = lora.as_stored(arrays)
    checkpoint.write_arrays(path, arrays, {"family": "tiny", "project": "cats", "step": "70", **adapter_metadata(targets)})
    return arrays, target_scales(targets)


def with_merged_weights(transformer: Any, arrays: dict[str, mx.array], scales: dict[str, float]) -> np.ndarray:
    """The output of the base with the adapter merged into its weights, and the base put back."""
    import torch

    kept = {k: v.clone() for k, v in transformer.state_dict().items()}
    weights = {f"{name}.weight": mx.array(kept[f"{name}.weight"].numpy()) for name in scales}
    new = {name: torch.tensor(np.array(value)) for name, value in merged_weights(weights, arrays, scales).items()}
    transformer.load_state_dict(kept | new)
    try:
        return forward(transformer)
    finally:
        transformer.load_state_dict(kept)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_export_of_every_variant_read_again_is_the_same_adapter_and_diffusers_gives_the_output_of_the_merged_weights(
    tmp_path: Path, transformer: Any, variant: str, style: str
) -> None:
    lines: list[str] = []
    arrays, scales = trained_variant(tmp_path / "a.safetensors", transformer, variant)
    ours = FLUX2.read_adapter(tmp_path / "a.safetensors")
    assert ours[1] == scales and set(ours[0]) == set(arrays)
    file = write_adapter(
        tmp_path / "a.safetensors", TINY, tmp_path / "out", style, dtype="float32", metadata={}, say=lines.append
    )
    weights = {f"{name}.weight": mx.zeros(lora.linear_shape(lora.arrays_of_linear(arrays, name))) + 0.1 for name in scales}
    wanted, found = (merged_weights(weights, *adapter) for adapter in ((arrays, scales), FLUX2.read_adapter(file)))
    assert all(mx.allclose(found[name], value, rtol=1e-5, atol=1e-6) for name, value in wanted.items())
    assert len(lines) == (variant not in ("rslora", "orthogonal"))
    assert all("\n" not in line and {"dora": "DoRA"}.get(variant, "LoKr") in line for line in lines)
    if (variant, style) != ("dora", "comfyui"):  # diffusers drops the dora_scale that ComfyUI wants
        want = with_merged_weights(transformer, arrays, scales)
        assert np.abs(want - forward(transformer)).max() > 0.01
        assert np.abs(through_diffusers(transformer, file) - want).max() < 1e-5


@pytest.mark.parametrize("factor", [None, 2, 4, 6, 8, 10, 16])
def test_diffusers_finds_the_factors_of_a_lokr_of_full_size_from_its_shapes(factor: int | None) -> None:
    import torch
    from diffusers.utils.peft_utils import _create_lokr_config

    for D in (3072, 4096, 6144):
        sizes = {"q": (D, D), "in": (6 * D, D), "out": (D, 3 * D), "fused": (9 * D, D), "last": (D, 4 * D)}
        made = {n: lora.lokr_shapes(*size, rank=32, factor=factor) for n, size in sizes.items()}
        arrays = {n + end: torch.empty(shape, device="meta") for n, own in made.items() for end, shape in own.items()}
        assert set(_create_lokr_config(arrays, None).target_modules) == set(sizes)


def test_a_dora_for_comfyui_has_a_column_of_lengths_in_float32_under_the_fused_names_and_one_of_some_of_q_k_v_is_not_fused(
    tmp_path: Path, transformer: Any
) -> None:
    arrays, _ = trained_variant(tmp_path / "a.safetensors", transformer, "dora")
    found, _ = read_file(write_adapter(tmp_path / "a.safetensors", TINY, tmp_path, "comfyui", dtype="bfloat16", metadata={}))
    scale = found["diffusion_model.double_blocks.1.img_attn.qkv.dora_scale"]
    parts = [arrays[f"transformer_blocks.1.attn.{n}.lora_magnitude_vector"] for n in ("to_q", "to_k", "to_v")]
    assert scale.shape == (96, 1) and scale.dtype == mx.float32
    assert mx.array_equal(scale[:, 0], mx.concatenate(parts))
    assert found["diffusion_model.double_blocks.1.img_attn.qkv.lora_A.weight"].shape == (4 + 2 + 4, 32)
    some = {key: value for key, value in arrays.items() if ".add_k_proj" not in key}
    checkpoint.write_arrays(tmp_path / "b.safetensors", some, {"alpha": "6"})
    with pytest.raises(ValueError, match=r"double_blocks.0.txt_attn.qkv: a DoRA of some .*; export as diffusers"):
        write_adapter(tmp_path / "b.safetensors", TINY, tmp_path, "comfyui", dtype="float32", metadata={})


def test_a_lokr_for_comfyui_is_one_in_lycoris_names_with_alpha(tmp_path: Path, transformer: Any) -> None:
    trained_variant(tmp_path / "a.safetensors", transformer, "lokr")
    found, said = read_file(write_adapter(tmp_path / "a.safetensors", TINY, tmp_path, "comfyui", dtype="bfloat16", metadata={}))
    name = "lycoris_transformer_blocks_0_attn_to_out_0"
    assert {key.removeprefix(name) for key in found if key.startswith(f"{name}.")} == {
        ".lokr_w1", ".lokr_w2_a", ".lokr_w2_b", ".alpha",
    }  # fmt: skip
    assert found[f"{name}.alpha"].item() == 6 and found[f"{name}.alpha"].dtype == mx.float32
    assert said["ss_network_module"] == "lycoris.kohya"


@pytest.mark.parametrize("kind", ["LoraConfig", "LoKrConfig"])
def test_a_file_that_diffusers_saved_with_its_own_alphas_is_read_with_them(tmp_path: Path, transformer: Any, kind: str) -> None:
    import peft
    import torch
    from diffusers import Flux2KleinPipeline

    torch.manual_seed(5)
    chosen = ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.1.attn.to_out", "transformer_blocks.0.ff.linear_in"]
    lora = kind == "LoraConfig"
    options: dict[str, Any] = {"lora_alpha": 10, "init_lora_weights": False} if lora else {"alpha": 10, "init_weights": False}
    options |= {} if lora else {"decompose_factor": 4, "decompose_both": True}
    patterns = {"rank_pattern": {chosen[2]: 1}, "alpha_pattern": {chosen[2]: 3}}
    config = getattr(peft, kind)(r=5, target_modules=chosen, **options, **patterns)
    adapted = copy.deepcopy(transformer)
    adapted.add_adapter(config)
    want = forward(adapted)
    arrays, scales = FLUX2.read_adapter(checkpoints.save_lora(Flux2KleinPipeline, tmp_path, adapted, config))
    assert scales == {chosen[0]: 2.0, chosen[1]: 2.0, chosen[2]: 3.0}
    assert np.abs(with_merged_weights(transformer, arrays, scales) - want).max() < 1e-5


def test_a_fused_lokr_is_taken_apart_where_that_is_exact_and_refused_elsewhere(tmp_path: Path, transformer: Any) -> None:
    from safetensors.numpy import save_file

    draw = np.random.default_rng(3)
    for rows, fits in ((6, True), (4, False)):
        w1, w2 = (draw.normal(0, 1, shape).astype(np.float32) for shape in ((rows, 4), (96 // rows, 8)))
        stem = "diffusion_model.double_blocks.0.img_attn.qkv"
        save_file({f"{stem}.lokr_w1": w1, f"{stem}.lokr_w2": w2, f"{stem}.alpha": np.float32([1e10])}, tmp_path / "f.safetensors")
        if not fits:
            with pytest.raises(ValueError, match="w1 of 4 rows, cannot be taken apart exactly"):
                FLUX2.read_adapter(tmp_path / "f.safetensors")
            continue
        arrays, scales = FLUX2.read_adapter(tmp_path / "f.safetensors")
        parts = [f"transformer_blocks.0.attn.{n}" for n in ("to_q", "to_k", "to_v")]
        assert scales == dict.fromkeys(parts, 1.0)
        stacked = np.concatenate([np.array(lora.kronecker(lora.arrays_of_linear(arrays, part))) for part in parts])
        np.testing.assert_allclose(stacked, np.kron(w1, w2), rtol=1e-6)


def test_a_dora_of_columns_and_one_without_its_lengths_are_refused(tmp_path: Path, transformer: Any) -> None:
    from safetensors.numpy import save_file

    name = f"transformer.{BLOCKS[0]}"
    pair = {name + A: np.ones((2, 32), np.float32), name + B: np.ones((32, 2), np.float32)}
    save_file({**pair, f"{name}.dora_scale": np.ones((1, 32), np.float32)}, tmp_path / "columns.safetensors")
    peft = {"lora_adapter_metadata": json.dumps({"transformer.use_dora": True, "transformer.r": 2})}
    save_file(pair, tmp_path / "without.safetensors", peft)
    save_file({**pair, f"{name}.lora_magnitude_vector": np.ones(5, np.float32)}, tmp_path / "short.safetensors")
    cases = {"columns": "lengths of columns", "without": "lacks the magnitudes", "short": "not one number for each of 32 rows"}
    for file, message in cases.items():
        with pytest.raises(ValueError, match=message) as error:
            FLUX2.read_adapter(tmp_path / f"{file}.safetensors")
        assert "\n" not in str(error.value)
