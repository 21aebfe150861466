"""Weights are read whole or refused in one line; in 8 bits or fewer, they are what other tools' own routines unpack."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save, save_file

from stages.models import weights
from stages.models.flux2.load import load_flux2
from stages.text_to_image.families import family
from tests import checkpoints

SHAPES = {"a.weight": (4, 3), "b.weight": (5,)}


def arrays():
    return {"a.weight": np.arange(12, dtype=np.float32).reshape(4, 3), "b.weight": np.ones(5, np.float32)}


def entry(start, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def file_of(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"a.weight": None, "a.weigth": np.ones((4, 3))}, r"lacks a\.weight \(1 of 2 tensors\); a\.weigth is there"),
        ({"c.weight": np.ones(1)}, r"holds c\.weight, which the architecture does not have"),
        ({"b.weight": np.ones(6)}, r"b\.weight must be \(5,\), got \(6,\)"),
        ({"c.weight_scale": np.ones(1)}, r"holds c\.weight_scale, the scale of a weight that is not in 8 bits: use the bfloat16"),
    ],
)
def test_a_tensor_that_is_missing_unexpected_or_of_another_shape_is_named(tmp_path, changed, said):
    given = {name: value.astype(np.float32) for name, value in (arrays() | changed).items() if value is not None}
    save_file(given, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=said):
        weights.load_component(tmp_path, SHAPES)
    if "c.weight" in changed:
        assert set(weights.load_component(tmp_path, SHAPES, ignore=lambda key: key == "c.weight")) == set(SHAPES)


def test_shards_are_read_by_their_index_and_a_missing_one_and_a_tensor_in_two_of_them_are_named(tmp_path):
    whole, places = arrays(), {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}
    for key, name in places.items():
        save_file({key: whole[key]}, tmp_path / name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / "other.safetensors").write_bytes(b"not a shard")
    assert set(weights.load_component(tmp_path, SHAPES)) == set(SHAPES)
    save_file(whole, tmp_path / "model-2.safetensors")
    with pytest.raises(ValueError, match="in more than one file"):
        weights.load_component(tmp_path, SHAPES)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-2\.safetensors of the 2 files"):
        weights.load_component(tmp_path, SHAPES)


def test_every_other_file_is_read_where_two_differ_only_in_precision_and_a_folder_without_any_is_reported(tmp_path):
    with pytest.raises(ValueError, match=r"looked for \*\.safetensors"):
        weights.load_component(tmp_path, SHAPES)
    for name in ("model.safetensors", "model.fp16.safetensors", "other.safetensors", "third.bf16.safetensors"):
        save_file(arrays(), tmp_path / name)
    found = [file.name for file in weights.weight_files(tmp_path)]
    assert found == ["model.safetensors", "other.safetensors", "third.bf16.safetensors"]


def test_casting_holds_no_more_than_one_tensor_twice(tmp_path):
    save_file({f"w{i}": np.ones((512, 512), np.float32) for i in range(8)}, tmp_path / "m.safetensors")
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    read = weights.load_component(tmp_path, {f"w{i}": (512, 512) for i in range(8)}, dtype=mx.bfloat16)
    held = mx.get_active_memory() - before
    assert held <= 8 * 2 * 512 * 512 * 1.05
    assert mx.get_peak_memory() - before <= held + 2 * 4 * 512 * 512
    del read


WHOLE = save(arrays())
NOT_WHOLE = "not a (whole )?safetensors file"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (WHOLE[:-7], f"cut short: {len(WHOLE) - 7} bytes, its header says {len(WHOLE)}"),
        (WHOLE + b"\0", "too long"),
        *((content, NOT_WHOLE) for content in (b"", b"\x01", struct.pack("<Q", 10**6) + b"{}")),
        (file_of({"a": entry(0, 16, [4]), "b": entry(8, 24, [4])}, bytes(24)), ""),  # overlapping
        (file_of({"a": entry(0, 16, [4]), "b": entry(20, 36, [4])}, bytes(36)), ""),  # a hole between them
        *((file_of({"a": entry(0, 16, shape)}, bytes(16)), "") for shape in ([2**40, 2**40], [-4], "4")),
        (file_of({"a": entry(0, 16, [4], "F77")}, bytes(16)), ""),
        (file_of({"a": entry(0, 4, [4], "F8_E8M0")}, bytes(4)), "a is F8_E8M0; fetch the bfloat16 weights"),
        (file_of({"a": entry(-16, 16, [8])}, bytes(16)), ""),
        (file_of({"a": entry(0, "16", [4])}, bytes(16)), ""),
        *((file_of({"a": entry(0, end, [4])}), "") for end in (1e999, 10**400, -16)),
        *((file_of(header), "") for header in ({"a": {"dtype": "F32", "shape": [4]}}, {"a": 7}, [])),
        *((file_of(header), "") for header in (b"[" * 100_000, b'{"a": ' * 100_000, b"\xff\xfe")),
        (file_of({"__metadata__": {"x": 7}, "a": entry(0, 16, [4])}, bytes(16)), ""),
    ],
)
def test_a_file_that_is_not_whole_or_has_a_hostile_header_is_one_line_and_no_tensor_is_read(tmp_path, content, said):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=said or None) as error:
        weights.read_tensors(tmp_path / "model.safetensors")
    assert "model.safetensors" in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin", "", 7, ["a"]])
def test_an_index_names_files_of_its_own_folder_only(tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(arrays(), tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": name}}))
    with pytest.raises(ValueError, match=r"must be a \.safetensors file in the same folder|is not an index of shards") as error:
        weights.weight_files(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("wrong", "place"), [(np.nan, 0), (np.inf, 4), (-np.inf, -1)])
def test_weights_that_are_not_finite_or_that_a_cast_makes_so_are_refused_with_the_tensors_name(
    tmp_path, monkeypatch, wrong, place
):
    monkeypatch.setattr(weights, "STRETCH", 4)
    damaged = arrays()
    damaged["a.weight"].reshape(-1)[place] = wrong
    save_file(damaged, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"a\.weight has values that are infinite or not a number"):
        weights.load_component(tmp_path, SHAPES)
    save_file(arrays() | {"b.weight": np.full(5, 1e30, np.float32)}, tmp_path / "model.safetensors")
    assert weights.load_component(tmp_path, SHAPES, dtype=mx.bfloat16)
    with pytest.raises(ValueError, match=r"b\.weight has values that are infinite"):
        weights.load_component(tmp_path, SHAPES, dtype=mx.float16)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"])
@pytest.mark.parametrize("prefix", [None, "model.diffusion_model.", "diffusion_model."])
def test_a_transformer_in_8_or_16_bits_is_read_by_the_names_of_diffusers_and_of_single_files_after_each_prefix(
    dtype: str, prefix: str | None, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import save_file

    record, draw = family("tiny"), torch.Generator().manual_seed(2)
    shapes = record.architecture.transformer_config(None, record).shapes()
    given = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    named = given if prefix is None else checkpoints.as_single_file(given, prefix)
    kind = getattr(torch, dtype)
    if "float8" in dtype:
        scales, ending = {None: ("row", "weight_scale"), "diffusion_model.": ("tensor", "scale_weight")}.get(prefix, ("none", ""))
        stored, values = checkpoints.in_fp8(named, kind, scales, ending)
    else:
        stored = {key: value.to(kind) for key, value in named.items()}
        values = {key: value.float() for key, value in stored.items()}
    for file, tensors in (("stored", stored), ("plain", values)):
        save_file({key: value.contiguous() for key, value in tensors.items()}, tmp_path / f"{file}.safetensors")
    found, plain = (
        checkpoints.weights_of(load_flux2(tmp_path / f"{n}.safetensors", record, mx.float32)) for n in ("stored", "plain")
    )
    assert found.keys() == plain.keys() == shapes.keys()
    for name, value in plain.items():
        np.testing.assert_array_equal(np.array(found[name]), np.array(value), name)


QUANTISED = {"a.weight": (4, 64)}


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
def test_scales_that_do_not_fit_are_one_line(arrays: dict[str, mx.array], said: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    stored = {"a.weight": torch.ones(4, 64).to(torch.float8_e4m3fn)}
    save_file(stored | {name: torch.tensor(np.array(value)) for name, value in arrays.items()}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=said) as error:
        weights.load_component(tmp_path, QUANTISED)
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
        weights.load_component(tmp_path, QUANTISED)
    assert "\n" not in str(error.value)
