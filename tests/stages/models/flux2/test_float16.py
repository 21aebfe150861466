"""Weights that are kept as float16, as the bundled family's are: read into what a stage computes in, whole or in shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import load_file, save_file

from stages.models.flux2.autoencoder import load_autoencoder
from stages.models.flux2.load import load_flux2
from stages.models.flux2.transformer import Flux2, Flux2Config, image_ids, text_ids
from stages.models.folders import read_config
from stages.models.text.encoder import TextEncoder
from stages.text_to_image.families import family
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.memory import BatchShape, ImageEstimator
from stages.text_to_image.weights import load_transformer
from stages.tuner.weights import QuantizedWeight, pack_if_possible
from tests.checkpoints import weights_of

TINY = family("tiny")
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
STEM = "diffusion_pytorch_model"


def rewrite(source: Path, target: Path, *, kept: Any) -> Path:
    """The folder again, every weight rounded to float16 and kept as `kept`."""
    shutil.copytree(source, target)
    for file in target.rglob("*.safetensors"):
        arrays = load_file(file)
        save_file({k: v.astype(np.float16).astype(kept) if v.dtype == np.float32 else v for k, v in arrays.items()}, file)
    return target


def shard(folder: Path) -> None:
    file = folder / f"{STEM}.safetensors"
    arrays = load_file(file)
    file.unlink()
    names = [f"{STEM}-{n}-of-00002.safetensors" for n in ("00001", "00002")]
    places = {key: names[number % 2] for number, key in enumerate(arrays)}
    for name in names:
        save_file({key: value for key, value in arrays.items() if places[key] == name}, folder / name)
    (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    """In float16, the transformer in shards."""
    made = rewrite(tiny_weights, tmp_path_factory.mktemp("half") / "weights", kept=np.float16)
    shard(made / "transformer")
    return made


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    """The same numbers in float32."""
    return rewrite(tiny_weights, tmp_path_factory.mktemp("rounded") / "weights", kept=np.float32)


def velocity(model: Flux2) -> np.ndarray:
    draw = np.random.default_rng(0)
    dtype = model.dtype
    x_1LC = mx.array(draw.standard_normal((1, 12, 128)).astype(np.float32)).astype(dtype)
    ctx_1TJ = mx.array(draw.standard_normal((1, 7, model.config.joint_attention_dim)).astype(np.float32)).astype(dtype)
    made = model(x_1LC, image_ids(3, 4), ctx_1TJ, text_ids(7), mx.array([0.6]))
    assert made.dtype == dtype
    return np.array(made.astype(mx.float32))


@pytest.mark.parametrize("precision", DTYPES)
def test_a_transformer_in_float16_and_in_shards_computes_what_its_numbers_in_float32_do(half, rounded, precision):
    one, other = (load_flux2(folder / "transformer", TINY, DTYPES[precision]) for folder in (half, rounded))
    assert {value.dtype for value in weights_of(one).values()} == {DTYPES[precision]}
    found = velocity(one)
    assert found.std() > 0.1
    np.testing.assert_array_equal(found, velocity(other))


@pytest.mark.parametrize("precision", DTYPES)
def test_an_autoencoder_in_float16_computes_what_its_numbers_in_float32_do(half, rounded, precision):
    image = mx.random.uniform(-1, 1, (1, 64, 48, 3), key=mx.random.key(0)).astype(DTYPES[precision])
    one, other = (load_autoencoder(folder / "vae", TINY, DTYPES[precision]) for folder in (half, rounded))
    assert one.weights["bn.running_var"].dtype == mx.float32
    latents = [model.encode(image) for model in (one, other)]
    np.testing.assert_array_equal(*(np.array(each.astype(mx.float32)) for each in latents))
    drawn = [model.decode(latents[0]) for model in (one, other)]
    np.testing.assert_array_equal(*(np.array(each.astype(mx.float32)) for each in drawn))


@pytest.mark.parametrize("precision", DTYPES)
def test_a_text_encoder_in_float16_computes_what_its_numbers_in_float32_do(half, rounded, precision):
    words = []
    for folder in (half, rounded):
        encoder = TextEncoder(folder / "text_encoder", folder / "tokenizer", TINY, precision)
        words.append(np.stack([made.words for made in encoder.encode(["a red apple", ""])]))
    np.testing.assert_array_equal(*words)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_the_plan_counts_the_bytes_that_float16_weights_take_once_they_are_loaded(half, precision, bits):
    c = TrainConfig(precision=precision, base_bits=bits)
    model: Any = load_transformer(half / "transformer", TINY, DTYPES[precision], c)
    sizes = Flux2Config.from_dict(read_config(half / "transformer"))
    estimator = ImageEstimator(c, TINY.architecture, sizes, BatchShape(1, 64, 64, 8, 16))
    assert estimator.frozen["weights"] == sum(array.nbytes for _, array in tree_flatten(weights_of(model)))


@pytest.mark.parametrize("bits", [8, 4])
def test_float16_weights_are_packed_to_the_same_bits_as_their_numbers_in_float32(half, rounded, bits):
    pack = lambda name, weight: pack_if_possible(weight, bits)  # noqa: E731
    one, other = (load_flux2(folder / "transformer", TINY, mx.float32, pack) for folder in (half, rounded))
    ours, theirs = weights_of(one), weights_of(other)
    packed = [name for name, value in ours.items() if isinstance(value, QuantizedWeight)]
    assert len(packed) > 10
    for name in packed:
        for mine, same in zip(ours[name], theirs[name], strict=True):
            assert mine.dtype == same.dtype and bool(mx.array_equal(mine, same))
