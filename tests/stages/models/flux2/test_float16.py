"""Weights that are kept as float16, as the bundled family's are, whose pictures tests/data/micro compares with diffusers'."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import load_file, save_file

from stages.models.flux2.transformer import Flux2Config
from stages.models.folders import read_config
from stages.text_to_image.families import family
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.memory import BatchShape, ImageEstimator
from stages.text_to_image.weights import load_transformer
from tests.checkpoints import weights_of

TINY = family("tiny")
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    """The transformer in float16."""
    folder = shutil.copytree(tiny_weights / "transformer", tmp_path_factory.mktemp("half") / "transformer")
    for file in folder.glob("*.safetensors"):
        save_file({name: value.astype(np.float16) for name, value in load_file(file).items()}, file)
    return folder


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_the_plan_counts_the_bytes_that_float16_weights_take_once_they_are_loaded(half, precision, bits):
    c = TrainConfig(precision=precision, base_bits=bits)
    model: Any = load_transformer(half, TINY, DTYPES[precision], c)
    sizes = Flux2Config.from_dict(read_config(half))
    estimator = ImageEstimator(c, TINY.architecture, sizes, BatchShape(1, 64, 64, 8, 16))
    assert estimator.frozen["weights"] == sum(array.nbytes for _, array in tree_flatten(weights_of(model)))
