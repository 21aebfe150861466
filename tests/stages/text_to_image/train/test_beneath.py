"""Other adapters: those beneath the trained one, as if merged into the weights, and the one that a run starts from."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from pipeline.commands.text_to_image.export import write_merged
from stages.text_to_image.beneath import BeneathConfig
from stages.text_to_image.train.stage import STAGE
from stages.tuner import checkpoint
from stages.tuner.adapters import lora
from stages.tuner.adapters.targets import Variant, adapter_metadata, fresh_adapter, select_targets, target_weights
from tests.stages.text_to_image.train.runs import BASE, TINY, Run


def adapter(file: Path, transformer: Path, variant: Variant, seed: int) -> Path:
    """An adapter that changes the model about as much as a trained one does."""
    model = TINY.architecture.load_transformer(transformer, TINY)
    targets = select_targets(model.linears(), ["*"], rank=2, alpha=4.0, variant=variant)
    weights = target_weights(model.blocks, targets) if variant == "dora" else None
    fresh = fresh_adapter(targets, seed, weights)
    draw = np.random.default_rng(seed)
    arrays = {key: value + mx.array(draw.normal(0, 0.1, value.shape).astype(np.float32)) for key, value in fresh.items()}
    checkpoint.write_arrays(file, arrays, {"family": "tiny", **adapter_metadata(targets)})
    return file


@pytest.mark.parametrize("variant", ["lora", "dora", "lokr"])
def test_training_over_a_frozen_adapter_is_training_on_weights_into_which_it_was_merged(transformer, tmp_path, variant):
    file = adapter(tmp_path / "beneath.safetensors", transformer, variant, 1)
    merged = write_merged(transformer, TINY, file, tmp_path / "merged", dtype="float32")
    config = replace(BASE, steps=5, checkpoint_every=5, lr=1e-3)
    over = Run(tmp_path / "over", transformer, replace(config, beneath=(BeneathConfig(str(file)),))).go()
    on = Run(tmp_path / "on", merged, config).go()
    plain = Run(tmp_path / "plain", transformer, config).go()
    found, expected, without = (
        TINY.architecture.read_adapter(run.folder / "artifacts/adapter.safetensors")[0] for run in (over, on, plain)
    )
    largest = max(np.abs(np.array(expected[key] - found[key])).max() for key in expected)
    assert largest <= 1e-5 < max(np.abs(np.array(expected[key] - without[key])).max() for key in expected)
    losses = [[row["loss"] for row in run.rows] for run in (over, on)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_the_recipe_of_a_run_has_the_adapters_beneath_and_their_strength(transformer, tmp_path):
    file = adapter(tmp_path / "beneath.safetensors", transformer, "lora", 1)
    over = Run(tmp_path / "b", transformer, replace(BASE, beneath=(BeneathConfig(str(file), 0.5, False),)))
    assert "beneath 0 at 0.5" in STAGE.snapshot(over.context())["caption_id"].to_pylist()
    assert over.task().metadata["beneath"] == "beneath.safetensors at 0.5, not drawn"


def test_an_adapter_beneath_that_does_not_fit_is_refused_before_weights_are_read(transformer, deep, tmp_path, monkeypatch):
    absent = Run(tmp_path / "a", transformer, replace(BASE, beneath=(BeneathConfig("nothing.safetensors"),)))
    with pytest.raises(ValueError, match=r"beneath: file must be an adapter's file, got 'nothing.safetensors'"):
        absent.go()
    other = adapter(tmp_path / "deep.safetensors", deep, "lora", 1)
    monkeypatch.setattr("stages.text_to_image.train.task.load_transformer", None)
    with pytest.raises(ValueError, match=r"beneath: .*deep.safetensors does not fit tiny: .* of another model"):
        Run(tmp_path / "b", transformer, replace(BASE, beneath=(BeneathConfig(str(other)),))).go()


def test_with_packed_weights_on_disk_the_adapter_beneath_is_in_them(wide, tmp_path):
    file = adapter(tmp_path / "beneath.safetensors", wide, "lora", 1)
    merged = write_merged(wide, TINY, file, tmp_path / "merged", dtype="float32")
    config = replace(BASE, steps=2, base_bits=8, stream_blocks=True)
    over = Run(tmp_path / "over", wide, replace(config, beneath=(BeneathConfig(str(file)),))).go()
    assert over.rows == Run(tmp_path / "on", merged, config).go().rows


# From which a run starts


@pytest.fixture(scope="module")
def first(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter of a run."""
    run = Run(tmp_path_factory.mktemp("first"), wide, replace(BASE, steps=1)).go()
    return run.folder / "artifacts" / checkpoint.ADAPTER


def test_a_run_starts_from_another_adapter_and_its_content_is_part_of_the_recipe(first, wide, tmp_path):
    file = Path(shutil.copy(first, tmp_path))
    run = Run(tmp_path / "second", wide, replace(BASE, initial=str(file), rank=3))
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


@pytest.mark.parametrize(
    ("values", "sizes", "said"),
    [
        ({"rank": 1}, {}, r"\[train\] initial: the adapter of .* must have a rank <= 1, got 2: raise the rank to 2$"),
        ({}, {"attention_head_dim": 16, "axes_dims_rope": (4, 4, 4, 4)}, r"initial: the adapter .* is it of another model\?"),
    ],
)
def test_an_initial_adapter_that_does_not_fit_is_refused_before_a_weight_is_read(values, sizes, said, first, wide, tmp_path):
    bare = tmp_path / "transformer"  # sizes, and no weights at all
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(json.loads((wide / "config.json").read_text()) | sizes))
    with pytest.raises(ValueError, match=said):
        Run(tmp_path / "second", bare, replace(BASE, initial=str(first), **values)).go()
