"""Runs that start from another adapter."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from stages.text_to_image.train.stage import STAGE
from stages.tuner import checkpoint
from stages.tuner.adapters import lora
from tests.stages.text_to_image.train.runs import BASE, Run


@pytest.fixture(scope="module")
def transformer(wide: Path) -> Path:
    return wide


@pytest.fixture(scope="module")
def first(transformer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter of a run."""
    run = Run(tmp_path_factory.mktemp("first"), transformer, replace(BASE, steps=1)).go()
    return run.folder / "artifacts" / checkpoint.ADAPTER


def test_a_run_starts_from_another_adapter_and_its_content_is_part_of_the_recipe(first, transformer, tmp_path):
    file = Path(shutil.copy(first, tmp_path))
    run = Run(tmp_path / "second", transformer, replace(BASE, initial=str(file), rank=3))
    made = run.training()
    saved = mx.load(str(file))
    for name in made.scales:
        given = saved[name + lora.B] @ saved[name + lora.A]
        np.testing.assert_allclose(
            np.array(made.scales[name] * made.adapter[name + lora.B] @ made.adapter[name + lora.A]), np.array(given), atol=1e-6
        )
    before = STAGE.snapshot(run.context()).to_pylist()
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert STAGE.snapshot(run.context()).to_pylist() != before
    run.config = replace(BASE, initial=str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"\[train\] initial: there is no file"):
        STAGE.snapshot(run.context())


def test_an_error_about_targets_or_ranks_names_the_setting(transformer, tmp_path):
    for values, said in (
        ({"targets": ("attn.to_z",)}, r"\[train\] targets: 'attn.to_z' matches no Linear of the blocks; nearest: attn.to_"),
        ({"rank_for": {"atn.*": 4}}, r"\[train\] rank_for: 'atn.\*' matches no target; nearest: attn"),
        ({"rslora": True}, r"\[train\] rslora needs an alpha, .*; alpha = 1.41 gives a scale of 1"),
    ):
        with pytest.raises(ValueError, match=said):
            Run(tmp_path / "second", transformer, replace(BASE, **values)).training()


SMALLER = {"attention_head_dim": 16, "axes_dims_rope": (4, 4, 4, 4)}


@pytest.mark.parametrize(
    ("values", "sizes", "said"),
    [
        ({"targets": ("attn.to_q",)}, {}, r"\[train\] initial: the adapter has .*, which is not a target: add it to the targets"),
        ({"rank": 1}, {}, r"\[train\] initial: the adapter of .* must have a rank <= 1, got 2: raise the rank to 2"),
        ({"variant": "lokr"}, {}, "initial: the adapter of .* must be a LoKr .*, got a LoRA"),
        ({}, SMALLER, r"initial: the adapter of .* must be for shape .*, got .*: is it of another model\?"),
    ],
)
def test_an_initial_adapter_that_does_not_fit_is_refused_before_a_weight_is_read(
    values, sizes, said, first, transformer, tmp_path
):
    bare = tmp_path / "transformer"  # sizes, and no weights at all
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(json.loads((transformer / "config.json").read_text()) | sizes))
    with pytest.raises(ValueError, match=said) as caught:
        Run(tmp_path / "second", bare, replace(BASE, initial=str(first), **values)).go()
    assert "\n" not in str(caught.value)
