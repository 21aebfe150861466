import json
import os
import struct

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.models import weights

SHAPES = {"a.weight": (4, 3), "b.weight": (5,)}


def arrays():
    return {"a.weight": np.arange(12, dtype=np.float32).reshape(4, 3), "b.weight": np.ones(5, np.float32)}


def test_every_tensor_is_loaded_with_its_values_in_the_dtype_asked_for(tmp_path):
    save_file(arrays(), tmp_path / "model.safetensors")
    read = weights.load_component(tmp_path, SHAPES, dtype=mx.bfloat16)
    assert set(read) == set(SHAPES)
    assert {v.dtype for v in read.values()} == {mx.bfloat16}
    assert np.array_equal(np.array(read["a.weight"].astype(mx.float32)), arrays()["a.weight"])


@pytest.mark.parametrize("missing", [1, 7, 40])
def test_a_file_cut_short_is_refused_with_its_size(tmp_path, missing):
    file = tmp_path / "model.safetensors"
    save_file(arrays(), file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-missing])
    with pytest.raises(ValueError, match=rf"cut short: {len(whole) - missing} bytes, its header says {len(whole)}"):
        weights.load_component(tmp_path, SHAPES)


def test_a_file_longer_than_its_header_says_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(arrays(), file)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="too long"):
        weights.load_component(file, SHAPES)


@pytest.mark.parametrize("content", [b"", b"\x01", struct.pack("<Q", 10**6) + b"{}", struct.pack("<Q", 2) + b"[]"])
def test_a_file_that_is_no_safetensors_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"not a (whole )?safetensors file") as caught:
        weights.load_component(tmp_path, SHAPES)
    assert "\n" not in str(caught.value)


def test_a_missing_tensor_is_named_with_the_unknown_one_that_resembles_it(tmp_path):
    save_file({"a.weigth": np.ones((4, 3), np.float32), "b.weight": np.ones(5, np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"lacks a\.weight \(1 of 2 tensors\); a\.weigth is there"):
        weights.load_component(tmp_path, SHAPES)


def test_an_unexpected_tensor_is_refused_unless_it_is_ignored_by_name(tmp_path):
    save_file(arrays() | {"c.weight": np.ones(1, np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"holds c\.weight, which the architecture does not have"):
        weights.load_component(tmp_path, SHAPES)
    assert set(weights.load_component(tmp_path, SHAPES, ignore=lambda key: key == "c.weight")) == set(SHAPES)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path):
    save_file(arrays() | {"b.weight": np.ones(6, np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"b\.weight must be \(5,\), got \(6,\)"):
        weights.load_component(tmp_path, SHAPES)


def test_many_wrong_names_are_counted_not_listed(tmp_path):
    save_file({f"x{i}": np.ones(1, np.float32) for i in range(9)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="and 6 more"):
        weights.load_component(tmp_path, {})


def test_shards_are_read_by_their_index(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "other.safetensors").write_bytes(b"not a shard")
    assert set(weights.load_component(tmp_path, SHAPES)) == set(SHAPES)


def test_a_missing_shard_is_named(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-2\.safetensors of the 2 files"):
        weights.load_component(tmp_path, SHAPES)


def test_a_tensor_that_two_shards_hold_is_refused(tmp_path):
    write_shards(tmp_path)
    save_file(arrays(), tmp_path / "model-2.safetensors")
    with pytest.raises(ValueError, match="in more than one file"):
        weights.load_component(tmp_path, SHAPES)


def test_a_folder_without_weights_is_reported_with_the_names_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"looked for \*\.safetensors"):
        weights.load_component(tmp_path, SHAPES)


def test_of_two_variants_of_the_same_weights_the_plain_one_is_read(tmp_path):
    save_file(arrays(), tmp_path / "model.safetensors")
    save_file(arrays(), tmp_path / "model.fp16.safetensors")
    assert weights.weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_every_other_file_is_read_where_two_differ_only_in_precision(tmp_path):
    for name in ("model.safetensors", "model.fp16.safetensors", "other.safetensors", "third.bf16.safetensors"):
        save_file(arrays(), tmp_path / name)
    assert [f.name for f in weights.weight_files(tmp_path)] == [
        "model.safetensors",
        "other.safetensors",
        "third.bf16.safetensors",
    ]


def test_weights_of_an_unknown_dtype_are_refused_by_name(tmp_path):
    head = json.dumps({"a.weight": {"dtype": "F8_E8M0", "shape": [4, 3], "data_offsets": [0, 12]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(12))
    with pytest.raises(ValueError, match=r"a\.weight is F8_E8M0; fetch the bfloat16 weights"):
        weights.load_component(tmp_path, SHAPES)


def test_a_scale_without_its_eight_bit_weight_is_refused_in_a_single_file(tmp_path):
    save_file(arrays() | {"c.weight_scale": np.ones(1, np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"holds c\.weight_scale, the scale of a weight that is not in 8 bits: use the bfloat16"):
        weights.load_component(tmp_path, SHAPES)


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


def write_shards(folder):
    whole = arrays()
    places = {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}
    for key, name in places.items():
        save_file({key: whole[key]}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def written(path, header, data=b""):
    """Write a safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(start, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": entry(0, 16, [4]), "b": entry(8, 24, [4])}, bytes(24)),  # overlapping
        ({"a": entry(0, 16, [4]), "b": entry(20, 36, [4])}, bytes(36)),  # a hole between them
        ({"a": entry(0, 16, [2**40, 2**40])}, bytes(16)),
        ({"a": entry(0, 16, [-4])}, bytes(16)),
        ({"a": entry(0, 16, [4], "F77")}, bytes(16)),
        ({"a": entry(0, 16, "4")}, bytes(16)),
        ({"a": entry(16, 0, [4])}, b""),
        ({"a": entry(-16, 16, [8])}, bytes(16)),
        ({"a": {"dtype": "F32", "shape": [4]}}, b""),
        ({"a": entry(0, "16", [4])}, bytes(16)),
        ({"a": entry(0, 1e999, [4])}, b""),
        ({"a": entry(0, 10**400, [4])}, b""),
        ({"a": 7}, b""),
        ([], b""),
        (b"[" * 100_000, b""),
        (b'{"a": ' * 100_000, b""),
        (b"\xff\xfe", b""),
        ({"__metadata__": {"x": 7}, "a": entry(0, 16, [4])}, bytes(16)),
    ],
)
def test_a_hostile_header_is_one_line_and_no_tensor_is_read(tmp_path, header, data):
    file = written(tmp_path / "model.safetensors", header, data)
    with pytest.raises(ValueError) as error:
        weights.read_tensors(file)
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


def test_a_named_pipe_as_weights_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a regular file"):
        weights.read_tensors(tmp_path)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 4, -1])
def test_weights_that_are_not_finite_are_refused_with_the_tensors_name(tmp_path, monkeypatch, wrong, place):
    monkeypatch.setattr(weights, "STRETCH", 4)
    damaged = arrays()
    damaged["a.weight"].reshape(-1)[place] = wrong
    save_file(damaged, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"a\.weight has values that are infinite or not a number"):
        weights.load_component(tmp_path, SHAPES)


def test_how_much_of_a_large_model_is_read_is_shown_while_it_is_read_and_not_after():
    noted = []
    tensors = {name: mx.zeros(200_000_000, mx.uint8) for name in "abc"}
    with weights.reading("the transformer", noted.append):
        weights.evaluate_each(tensors, None, lambda name, value: value[:1])
    assert noted == [f"reading the transformer: {read} of 0.6 GB" for read in (0.2, 0.4, 0.6)] + [""]
    weights.evaluate_each({"a": mx.zeros(600_000_000, mx.uint8)}, None, lambda name, value: value[:1])
    assert len(noted) == 4


def test_a_weight_that_a_cast_makes_infinite_is_refused(tmp_path):
    save_file(arrays() | {"b.weight": np.full(5, 1e30, np.float32)}, tmp_path / "model.safetensors")
    assert weights.load_component(tmp_path, SHAPES, dtype=mx.bfloat16)
    with pytest.raises(ValueError, match=r"b\.weight has values that are infinite"):
        weights.load_component(tmp_path, SHAPES, dtype=mx.float16)
