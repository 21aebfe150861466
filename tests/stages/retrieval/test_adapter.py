"""Merging an adapter into the weights of a retriever: all of its Linears, whatever the order of its arrays."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.models.t5.model import T5, T5Config
from stages.retrieval.encoder import Encoder, merge_all, read_adapter
from stages.tuner.adapters import lora
from stages.tuner.adapters.targets import adapter_metadata, fresh_adapter, select_targets

SIZES = T5Config(vocab_size=70, d_model=32, d_kv=8, d_ff=48, num_layers=12, num_heads=4, gated=True, dimensions=24)
ORDERS = 15


@pytest.fixture(scope="module")
def weights() -> dict[str, mx.array]:
    rng = np.random.default_rng(0)
    return {n: mx.array(rng.normal(size=s) / s[-1] ** 0.5, mx.float32) for n, s in SIZES.shapes().items()}


def write(path: Path, patterns: tuple[str, ...], weights: dict[str, mx.array], whole: tuple[str, ...] = ()) -> None:
    targets = select_targets(T5(SIZES, weights).linears(), patterns, 4, 8.0, whole=whole)
    rng = np.random.default_rng(1)
    arrays = {
        name: mx.array(rng.normal(size=a.shape) / 20, mx.float32) if name.endswith(lora.ZERO_AT_START) else a
        for name, a in fresh_adapter(targets, seed=0).items()
    }
    mx.save_safetensors(str(path), arrays, adapter_metadata(targets))


@pytest.mark.parametrize(("patterns", "count"), [(("q", "v"), 24), (("q", "k", "v", "o", "wi_0", "wi_1", "wo"), 84)])
def test_every_linear_is_merged_under_any_order_of_the_arrays(
    patterns: tuple[str, ...], count: int, weights: dict[str, mx.array], tmp_path: Path
) -> None:
    write(tmp_path / "a.safetensors", patterns, weights)
    arrays, scales = read_adapter(tmp_path / "a.safetensors", T5(SIZES, weights).linears())
    assert len(scales) == count
    wanted = merge_all(weights, arrays, scales)
    changed = [name for name in weights if not mx.array_equal(weights[name], wanted[name]).item()]
    assert changed == [f"{name}.weight" for name in T5(SIZES, weights).linears() if name in scales]
    for order in range(ORDERS):
        names = list(arrays)
        random.Random(order).shuffle(names)
        shuffled = {name: arrays[name] for name in names}
        merged = merge_all(dict(random.Random(order).sample(list(weights.items()), len(weights))), shuffled, scales)
        assert all(mx.array_equal(merged[name], wanted[name]).item() for name in changed)


def test_a_merged_encoder_scores_as_the_adapter_does(weights: dict[str, mx.array], tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", ("*",), weights, whole=("head.linear",))
    base = T5(SIZES, weights)
    arrays, scales = read_adapter(tmp_path / "a.safetensors", base.linears())
    assert len(scales) == 85
    merged = T5(SIZES, merge_all(weights, arrays, scales))
    rng = np.random.default_rng(2)
    texts = [rng.integers(2, 70, length).astype(np.int32) for length in (5, 9, 3, 30, 41, 17)]
    scores = []
    for encoder in (Encoder(base, arrays, scales, None, 32), Encoder(merged, {}, {}, None, 32), Encoder(base, {}, {}, None, 32)):
        found = encoder.encode_ids(texts)
        scores.append(np.array([[(q @ d.T).max(axis=1).mean() for d in found[3:]] for q in found[:3]]))
    assert np.abs(scores[0] - scores[1]).max() <= 2e-5
    assert (scores[0].argmax(1) == scores[1].argmax(1)).all()
    assert np.abs(scores[0] - scores[2]).max() > 0.05, "the adapter changes the scores"


def test_an_adapter_with_a_hostile_header_is_one_line(weights: dict[str, mx.array], tmp_path: Path) -> None:
    write(tmp_path / "good.safetensors", ("q",), weights)
    arrays = dict(mx.load(str(tmp_path / "good.safetensors")))
    for header in ({"scales": "[" * 60_000}, {"scales": "[]"}, {"alpha": "4", "linears": "7"}, {"alpha": "{}"}):
        mx.save_safetensors(str(tmp_path / "a.safetensors"), arrays, header)
        with pytest.raises(ValueError, match=r"a\.safetensors: .") as error:
            read_adapter(tmp_path / "a.safetensors", T5(SIZES, weights).linears())
        assert "\n" not in str(error.value)


def test_a_part_of_the_strength_is_that_part_of_the_way_from_the_base_to_the_tuned_weights(
    weights: dict[str, mx.array], tmp_path: Path
) -> None:
    write(tmp_path / "a.safetensors", ("*",), weights, whole=("head.linear",))
    base = T5(SIZES, weights)
    tuned = merge_all(weights, *read_adapter(tmp_path / "a.safetensors", base.linears()))
    ids = [np.arange(2, 12, dtype=np.int32)]
    for strength in (0.0, 0.5, 1.0):
        between = {name: value + strength * (tuned[name] - value) for name, value in weights.items()}
        part = read_adapter(tmp_path / "a.safetensors", base.linears(), strength)
        merged = merge_all(weights, *part)
        assert all(mx.allclose(merged[name], between[name], atol=1e-6).item() for name in weights)
        [wanted] = Encoder(T5(SIZES, between), {}, {}, None, 32).encode_ids(ids)
        [found] = Encoder(base, *part, None, 32).encode_ids(ids)
        assert np.abs(found - wanted).max() <= 2e-5
