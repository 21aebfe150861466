"""Forecasts of stages beside measured peaks, and what decides them: shapes alone."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa
import pytest

from stages.memory import Outlook
from stages.models.autoencoder import arrange
from stages.models.family import Family
from stages.models.flux2.autoencoder import Autoencoder, AutoencoderConfig
from stages.models.flux2.random_weights import weight
from stages.text_to_image import PIPELINE
from stages.text_to_image.families import family, transformer_sizes
from stages.text_to_image.memory import caption_rows, text_rows
from stages.text_to_image.sampler import drawing_memory
from stages.text_to_image.samples.config import SamplesConfig
from stages.text_to_image.train.memory import BatchShape, ImageEstimator
from stages.text_to_image.train.profile import profile_settings, random_batch, random_training, random_transformer
from stages.tuner.blockwise.backprop import model_forward
from stages.tuner.memory import MemoryPlan

TINY, KLEIN = family("tiny"), family("klein-base-4b")
SECTIONS: dict[str, Any] = {name: PIPELINE.stage(name).config() for name in PIPELINE.stages}
WIDE = replace(TINY, transformer=transformer_sizes(2, 3, 4, 256) | {"attention_head_dim": 64, "axes_dims_rope": (16,) * 4})
BUDGET = int(20e9)
LARGE = pytest.mark.proof("the estimate of drawing, of the autoencoder and of a step is near the peak at larger sizes", long=True)


def peak_beside(before: int) -> int:
    return mx.get_peak_memory() - before


def start() -> int:
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    return before


@pytest.mark.parametrize(
    ("side", "passes", "bits"),
    [(128, 1, 16), (128, 2, 4), *(pytest.param(*case, marks=LARGE) for case in ((256, 2, 16), (512, 1, 4)))],
)
def test_the_estimate_of_drawing_is_near_its_measured_peak(bits: Any, side: int, passes: int) -> None:
    config = replace(profile_settings(), precision="float32", base_bits=bits)
    model = random_transformer(WIDE, config)
    expected = drawing_memory(WIDE, None, SamplesConfig(base_bits=bits), "float32", (side, side), passes)
    held = sum(value.nbytes for block in model.blocks for value in flat(block.weights)) + sum(
        value.nbytes for value in flat(model.top)
    )
    assert held == pytest.approx(expected.held, rel=0.02)
    text = mx.zeros((1, TINY.text_tokens, 256))
    negative = text if passes == 2 else None
    predict = model_forward(model, None)
    predict.live_bytes = expected.live
    drawing = {"seed": 0, "steps": 2, "guidance": 3.0, "negative_1TJ": negative, "predict": predict}
    before = start()
    list(WIDE.architecture.draw(model, text, side, side, **drawing))
    measured = peak_beside(before) + held
    assert 0.75 < expected.peak / measured < 1.4, (expected, measured)


def flat(weights: dict[str, Any]) -> list[mx.array]:
    return [array for value in weights.values() for array in ([value] if isinstance(value, mx.array) else value)]


@pytest.mark.parametrize(
    ("encodes", "side"), [(True, 128), pytest.param(True, 512, marks=LARGE), (False, 128), pytest.param(False, 320, marks=LARGE)]
)
def test_the_estimate_of_the_autoencoder_is_near_its_measured_peak(encodes: bool, side: int) -> None:
    sizes = TINY.autoencoder | {"block_out_channels": (32, 32, 64, 64), "norm_num_groups": 8}
    larger: Family = replace(TINY, autoencoder=sizes)
    config = AutoencoderConfig.from_dict(sizes)
    arrays = {name: arrange(name, mx.array(weight(f"vae.{name}", shape, 0))) for name, shape in config.shapes().items()}
    model = Autoencoder(config, arrays)
    shape = (1, side, side, 3) if encodes else (1, 128, side // 16, side // 16)
    given = mx.array(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    mx.eval(arrays, given)
    expected = larger.architecture.autoencoder_memory(None, larger, side, side, 4, encodes)
    assert sum(array.nbytes for array in arrays.values()) == expected.held
    before = start()
    mx.eval(model.encode(given) if encodes else model.decode(given))
    assert 0.7 < expected.work / peak_beside(before) < 1.4, (expected, peak_beside(before))


@pytest.mark.parametrize(
    ("side", "samples", "plan"), [(128, 2, "whole"), (128, 2, "blocks"), pytest.param(512, 1, "blocks", marks=LARGE)]
)
def test_the_estimate_of_training_on_a_cpu_is_within_a_tenth_of_the_peak_of_a_step(side: int, samples: int, plan: str) -> None:
    config, record = profile_settings(rank=16), family("micro")
    shape = BatchShape(samples, side, side, record.text_tokens, record.architecture.pixels_per_token)
    sizes = record.architecture.transformer_config(None, record)
    expected = ImageEstimator(config, record.architecture, sizes, shape).blocks(samples).memory(plan, BUDGET)
    before = start()
    training, batch = random_training(record, config, MemoryPlan(plan, expected.live)), random_batch(record, shape)
    training.step([batch], config.lr)
    mx.reset_peak_memory()
    training.step([batch], config.lr)
    assert expected.peak == pytest.approx(peak_beside(before), rel=0.1)


def forecast(name: str) -> Any:
    return PIPELINE.stage(name).forecast


@pytest.mark.parametrize("name", ["latents", "embeddings", "train", "samples"])
def test_a_forecast_follows_from_settings_and_shapes_and_grows_with_the_size_of_images(name: str) -> None:
    found = forecast(name)

    def peak(side: int) -> int:
        sized = {"samples": replace(SECTIONS["samples"], width=side, height=side)}
        sized["buckets"] = replace(SECTIONS["buckets"], resolutions=(side,))
        return found(Outlook(SECTIONS | sized, KLEIN, BUDGET)).peak

    assert peak(512) == peak(512)
    assert peak(1024) >= peak(512)


def test_the_rows_of_texts_are_those_encoded_else_guessed_from_the_captions_else_those_of_a_long_one() -> None:
    tables: dict[str, pa.Table] = {}
    seen = Outlook(SECTIONS, family("z-image"), BUDGET, rows=lambda schema: tables.get(schema.name))
    assert (caption_rows(seen), text_rows(seen)) == ([160], 160)
    tables["captions"] = pa.table({"text": ["a cat", "a cat", "a cat " * 50, "a cat " * 500]})
    assert (caption_rows(seen), text_rows(seen)) == ([11, 110, 512], 512)
    assert forecast("embeddings")(seen).row_bytes == 2 * 2560 * (11 + 110 + 512) // 3
    tables["embeddings"] = pa.table({"shape": [[9, 2560], [40, 2560]]})
    assert (caption_rows(seen), text_rows(seen)) == ([9, 40], 64)
    assert caption_rows(replace(seen, family=KLEIN)) == [512]


def test_the_forecast_of_samples_counts_the_blocks_on_disk_and_not_in_memory() -> None:
    settings = ({"samples": SamplesConfig(base_bits=4, stream_blocks=on)} for on in (False, True))
    kept, streamed = (forecast("samples")(Outlook(SECTIONS | each, KLEIN, BUDGET)) for each in settings)
    assert (kept.file_bytes, kept.row_bytes) == (0, streamed.row_bytes)
    assert streamed.file_bytes > kept.peak - streamed.peak > 0.8 * streamed.file_bytes


def test_the_forecast_of_latents_follows_its_setting_and_not_the_environment_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)

    def peaks() -> list[int]:
        settings = [replace(SECTIONS["latents"], exact=exact) for exact in (True, False)]
        return [forecast("latents")(Outlook(SECTIONS | {"latents": one}, KLEIN, BUDGET)).peak for one in settings]

    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    unset = peaks()
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert unset == peaks() and unset[0] != unset[1]
