"""Transformers in the forms that people have, by the names of single files: GGUF, and fp8 with scales."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from stages.models.flux2.load import to_diffusers
from stages.text_to_image.families import family
from tests.checkpoints import SINGLE_FILES, in_fp8, weights_of
from tests.stages.models.test_gguf import file_of

Arrays = dict[str, np.ndarray]


def gguf(arrays: Arrays, folder: Path) -> tuple[Path, Arrays]:
    """llama.cpp's tools drop axes of length 1."""
    file = folder / "model-F32.gguf"
    flat = {name: value.ravel() if value.ndim == 2 and value.shape[0] == 1 else value for name, value in arrays.items()}
    file.write_bytes(file_of([(name, value.shape, 0, np.ascontiguousarray(value).tobytes()) for name, value in flat.items()]))
    return file, arrays


def fp8(arrays: Arrays, folder: Path) -> tuple[Path, Arrays]:
    """Matrices in e4m3 with one scale each; and the values that they stand for."""
    import torch
    from safetensors.torch import save_file

    rows = {name: value for name, value in arrays.items() if value.ndim == 2 and value.shape[0] == 1}  # kept as they are
    others = {name: torch.tensor(value) for name, value in arrays.items() if name not in rows}
    stored, values = in_fp8(others, torch.float8_e4m3fn, "tensor", "weight_scale")
    file = folder / "model-fp8.safetensors"
    save_file(stored | {name: torch.tensor(value) for name, value in rows.items()}, file)
    return file, rows | {name: value.numpy() for name, value in values.items()}


@pytest.mark.parametrize("form", [gguf, fp8])
@pytest.mark.parametrize("name", ["tiny", "flux3-tiny", "z-image-tiny"])
def test_a_transformer_in_the_names_of_a_single_file_is_read(
    name: str, form: Callable[[Arrays, Path], tuple[Path, Arrays]], tmp_path: Path
) -> None:
    record, draw = family(name), np.random.default_rng(0)
    shapes: dict[str, Any] = record.architecture.transformer_config(None, record).shapes()
    arrays = {each: draw.standard_normal(shape, np.float32) for each, shape in shapes.items()}
    file, values = form(SINGLE_FILES[record.code](arrays), tmp_path)
    plain = tmp_path / "plain.safetensors"
    mx.save_safetensors(str(plain), {each: mx.array(np.ascontiguousarray(value)) for each, value in values.items()})
    found, expected = (weights_of(record.architecture.load_transformer(each, record)) for each in (file, plain))
    assert set(found) == set(expected) == set(shapes)
    for each, value in expected.items():
        np.testing.assert_array_equal(np.array(found[each]), np.array(value), each)


def test_two_spellings_of_one_weight_are_refused() -> None:
    both = {f"transformer_blocks.0.attn.{name}.weight": mx.zeros((2, 2)) for name in ("to_out", "to_out.0")}
    with pytest.raises(ValueError, match=r"attn.to_out.weight and .*attn.to_out.0.weight are two spellings of one tensor"):
        to_diffusers(both)
