"""Transformers in the forms that people have, by the names of single files and of programs: GGUF, fp8, quantised by MLX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from stages.models.flux2 import load as flux2
from stages.models.flux3 import load as flux3
from stages.models.z_image import load as z_image
from stages.text_to_image.families import family
from tests.checkpoints import SINGLE_FILES, in_fp8, mflux_name, quantised, weights_of
from tests.stages.models.test_gguf import file_of

Arrays = dict[str, np.ndarray]
TINY = {"tiny": flux2, "flux3-tiny": flux3, "z-image-tiny": z_image}  # family -> module with `to_diffusers`


def random_arrays(name: str) -> Arrays:
    record, draw = family(name), np.random.default_rng(0)
    shapes: dict[str, Any] = record.architecture.transformer_config(None, record).shapes()
    return {each: draw.standard_normal(shape, np.float32) for each, shape in shapes.items()}


def gguf(name: str, folder: Path) -> tuple[Path, Arrays]:
    """llama.cpp's tools drop axes of length 1."""
    file, arrays = folder / "model-F32.gguf", SINGLE_FILES[family(name).code](random_arrays(name))
    flat = {key: value.ravel() if value.ndim == 2 and value.shape[0] == 1 else value for key, value in arrays.items()}
    file.write_bytes(file_of([(key, value.shape, 0, np.ascontiguousarray(value).tobytes()) for key, value in flat.items()]))
    return file, arrays


def fp8(name: str, folder: Path) -> tuple[Path, Arrays]:
    """Matrices in e4m3 with one scale each; and the values that they stand for."""
    import torch
    from safetensors.torch import save_file

    arrays = SINGLE_FILES[family(name).code](random_arrays(name))
    rows = {key: value for key, value in arrays.items() if value.ndim == 2 and value.shape[0] == 1}  # kept as they are
    others = {key: torch.tensor(value) for key, value in arrays.items() if key not in rows}
    stored, values = in_fp8(others, torch.float8_e4m3fn, "tensor", "weight_scale")
    file = folder / "model-fp8.safetensors"
    save_file(stored | {key: torch.tensor(value) for key, value in rows.items()}, file)
    return file, rows | {key: value.numpy() for key, value in values.items()}


def mflux(name: str, folder: Path) -> tuple[Path, Arrays]:
    """By names close to diffusers', quantised as MLX does."""

    def saved_as(key: str) -> str:
        if name != "z-image-tiny":
            return mflux_name(key) if name == "tiny" else key.replace("to_out.0", "to_out")
        key = key.replace("t_embedder.mlp.0", "t_embedder.linear1").replace("t_embedder.mlp.2", "t_embedder.linear2")
        return key.replace("2-1.adaLN_modulation.1", "2-1.adaLN_modulation.0")

    return in_8_bits(random_arrays(name), folder, saved_as)


def mlx(name: str, folder: Path) -> tuple[Path, Arrays]:
    """By the names of the single file, quantised as MLX does, as flux3-mlx saves."""
    single = SINGLE_FILES[family(name).code](random_arrays(name))
    return in_8_bits({key: value for key, value in single.items() if "repa" not in key}, folder, str)


def in_8_bits(arrays: Arrays, folder: Path, rename: Callable[[str], str]) -> tuple[Path, Arrays]:
    given = {key: mx.array(value) for key, value in arrays.items()}
    stored, values = quantised(given, 8, 32, rename, lambda key: "blocks" in key or "layers" in key)
    assert len(stored) > len(values)
    (folder / "mlx").mkdir()
    mx.save_safetensors(str(folder / "mlx" / "model.safetensors"), stored)
    (folder / "mlx" / "config.json").write_text('{"quantization": {"group_size": 32, "bits": 8}}')
    return folder / "mlx", {key: np.array(value) for key, value in values.items()}


@pytest.mark.parametrize("form", [gguf, fp8, mflux, mlx])
@pytest.mark.parametrize("name", TINY)
def test_a_transformer_in_the_form_and_the_names_of_another_program_is_read(
    name: str, form: Callable[[str, Path], tuple[Path, Arrays]], tmp_path: Path
) -> None:
    record = family(name)
    file, values = form(name, tmp_path)
    plain = tmp_path / "plain.safetensors"
    mx.save_safetensors(str(plain), {each: mx.array(np.ascontiguousarray(value)) for each, value in values.items()})
    found, expected = (weights_of(record.architecture.load_transformer(each, record)) for each in (file, plain))
    assert set(found) == set(expected) == set(record.architecture.transformer_config(None, record).shapes())
    for each, value in expected.items():
        np.testing.assert_array_equal(np.array(found[each]), np.array(value), each)


@pytest.mark.parametrize(("name", "module"), TINY.items())
def test_a_single_file_is_renamed_as_diffusers_does(name: str, module: Any) -> None:
    import torch
    from diffusers.loaders import single_file_utils

    arrays = random_arrays(name)
    single = SINGLE_FILES[family(name).code](arrays)
    convert = getattr(single_file_utils, f"convert_{module.__package__.split('.')[-1]}_transformer_checkpoint_to_diffusers")
    expected = convert({key: torch.tensor(value) for key, value in single.items()})
    for given in (single, arrays):  # those of diffusers stay
        found = module.to_diffusers({key: mx.array(value) for key, value in given.items()})
        assert set(found) == set(expected) == set(arrays)
        for key, value in expected.items():
            np.testing.assert_array_equal(np.array(found[key]), value.numpy(), key)


def test_two_spellings_of_one_weight_are_refused() -> None:
    both = {f"transformer_blocks.0.attn.{name}.weight": mx.zeros((2, 2)) for name in ("to_out", "to_out.0")}
    with pytest.raises(ValueError, match=r"attn.to_out.weight and .*attn.to_out.0.weight are two spellings of one tensor"):
        flux2.to_diffusers(both)
