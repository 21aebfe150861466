"""Loading T5 encoders from the layouts in use, strictly."""

from __future__ import annotations

import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.models.t5.files import load_encoder, load_weights, read_sizes, read_torch_file
from stages.models.t5.model import HEAD
from tests.stages.models.t5.test_encoder import reference


def save(form: str, folder: Path) -> tuple[Any, np.ndarray, Path]:
    model, head = reference(form)
    model.save_pretrained(folder)
    (folder / "1_Dense").mkdir()
    save_file({"linear.weight": head}, folder / "1_Dense" / "model.safetensors")
    return model, head, folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, np.ndarray, Path]:
    return save("gated", tmp_path_factory.mktemp("t5"))


def copied(saved: tuple[Any, np.ndarray, Path], to: Path) -> Path:
    return Path(shutil.copytree(saved[2], to / "model"))


def same_weights(model: Any, head: np.ndarray, folder: Path) -> bool:
    found = load_weights(folder, read_sizes(folder))
    wanted = {name: value.numpy() for name, value in model.state_dict().items() if name != "encoder.embed_tokens.weight"}
    return set(found) == {*wanted, HEAD} and all(np.array_equal(np.array(found[k]), v) for k, v in {**wanted, HEAD: head}.items())


@pytest.mark.parametrize("form", ["gated", "relu"])
def test_weights_of_both_forms_in_files_of_safetensors_and_of_pytorch_are_the_same_tensors_without_a_decoder(
    form: str, tmp_path: Path
) -> None:
    import torch

    model, head, folder = save(form, tmp_path / "t5")
    assert same_weights(model, head, folder)
    shutil.rmtree(folder / "1_Dense")
    (folder / "2_Dense").mkdir()  # of XTR
    torch.save({"linear.weight": torch.tensor(head)}, folder / "2_Dense" / "pytorch_model.bin")
    assert same_weights(model, head, folder)
    (folder / "model.safetensors").unlink()
    extra = {"decoder.block.0.layer.0.layer_norm.weight": torch.ones(3), "lm_head.weight": torch.ones(2, 2)}
    torch.save(model.state_dict() | extra, folder / "pytorch_model.bin")
    assert same_weights(model, head, folder)


def test_a_file_of_pytorch_that_would_run_code_is_refused(saved: Any, tmp_path: Path) -> None:
    import torch

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "touched",)

    folder = copied(saved, tmp_path)
    shutil.rmtree(folder / "1_Dense")
    (folder / "1_Dense").mkdir()
    torch.save({"linear.weight": Evil()}, folder / "1_Dense" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="is not a file of tensors that PyTorch saved"):
        load_encoder(folder)
    assert not (tmp_path / "touched").exists()


def test_a_damaged_file_of_pytorch_is_refused_in_one_line(tmp_path: Path) -> None:
    import torch

    file, draw = tmp_path / "pytorch_model.bin", random.Random(0)
    torch.save({"linear.weight": torch.ones(2, 3)}, file)
    with zipfile.ZipFile(file) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in content if name.endswith("data.pkl"))
    pickled = content[name]
    damaged = [b"ccollections\nOrderedDict\n(I5\ntR.", b"]."]  # OrderedDict(5); a list
    for _ in range(150):
        made = bytearray(pickled)
        for _ in range(draw.randint(1, 3)):
            made[draw.randrange(len(made))] = draw.randrange(256)
        damaged.append(bytes(made))
    refused = 0
    for each in damaged:
        with zipfile.ZipFile(file, "w") as archive:
            for entry, data in (content | {name: each}).items():
                archive.writestr(entry, data)
        try:
            read_torch_file(file)
        except ValueError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("shape", [(-1, 1), (-1,)])
def test_matrices_in_8_bits_are_unpacked_row_by_row(saved: Any, tmp_path: Path, shape: tuple[int, ...]) -> None:
    folder = copied(saved, tmp_path)
    stored: dict[str, mx.array] = dict(mx.load(str(folder / "model.safetensors")))
    packed: dict[str, mx.array] = {}
    for name, value in stored.items():
        if value.ndim == 2 and "relative" not in name:
            scale = mx.abs(value).max(axis=1, keepdims=True) / 127
            packed[name] = mx.round(value / scale).astype(mx.int8)
            packed[name + "_scale"] = scale.reshape(shape).astype(mx.float16)
        else:
            packed[name] = value
    mx.save_safetensors(str(folder / "model.safetensors"), packed)
    found, exact = load_weights(folder, read_sizes(folder)), load_weights(saved[2], read_sizes(saved[2]))
    for name, value in exact.items():
        assert mx.abs(found[name] - value).max().item() <= mx.abs(value).max().item() / 200, name
    packed.pop("encoder.block.1.layer.0.SelfAttention.q.weight_scale")
    mx.save_safetensors(str(folder / "model.safetensors"), packed)
    with pytest.raises(ValueError, match=r"block.1.layer.0.SelfAttention.q.weight is stored in 8 bits only with"):
        load_encoder(folder)


def without_a_norm(folder: Path) -> None:
    arrays: dict[str, mx.array] = dict(mx.load(str(folder / "model.safetensors")))
    arrays.pop("encoder.block.2.layer.1.layer_norm.weight")
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)


def head_of(**arrays: mx.array) -> Callable[[Path], None]:
    named = {f"linear.{name}": value for name, value in arrays.items()}
    return lambda folder: mx.save_safetensors(str(folder / "1_Dense" / "model.safetensors"), named)


TANH = '{"activation_function": "torch.nn.modules.activation.Tanh"}'


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_a_norm, r"lacks encoder.block.2.layer.1.layer_norm.weight \(1 of"),
        (lambda folder: shutil.rmtree(folder / "1_Dense"), r"has no projection head: looked for 1_Dense/ and 2_Dense/"),
        (head_of(weight=mx.ones((32, 40))), r"head.linear.weight must be \(32, 48\), got \(32, 40\)"),
        (
            head_of(weight=mx.ones((32, 48)), bias=mx.ones(32)),
            r"must hold linear.weight and nothing else, got linear.bias, linear.weight",
        ),
        (lambda folder: (folder / "1_Dense" / "config.json").write_text(TANH), r"must have no bias and no activation"),
    ],
)
def test_a_damaged_model_is_refused_in_one_line(
    saved: Any, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = copied(saved, tmp_path)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_encoder(folder)
