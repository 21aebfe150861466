"""Qwen3 against transformers' own, at tiny sizes in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from stages.models import weights
from stages.models.folders import read_config
from stages.models.text.decoder import Decoder, Qwen3Config, unneeded_beyond

LAYERS = (1, 2, 4)
ALL = 5  # layers of the reference
REAL = (7, 20, 1)  # real tokens of each row; the rest is padding
T = 20


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random Qwen3 by transformers, and the folder that it saved itself to."""
    import torch
    from transformers import Qwen3Config as TheirConfig
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    config = TheirConfig(
        vocab_size=99,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=ALL,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    model = Qwen3ForCausalLM(config).eval()
    for name, tensor in model.named_parameters():
        if "norm" in name:
            tensor.data = 1 + 0.3 * torch.randn_like(tensor)
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    return model, folder


def ours(folder: Path, layers: int) -> Decoder:
    config = Qwen3Config.from_dict(read_config(folder))
    loaded = weights.load_component(folder, config.shapes(layers), rename=config.weight_name, ignore=unneeded_beyond(layers, ALL))
    return Decoder(config, loaded)


@pytest.mark.parametrize("layers", [LAYERS, (2, ALL)], ids=["below the last", "the last, which is normalised"])
def test_hidden_states_are_those_of_transformers_and_need_no_layer_above(
    reference: tuple[Any, Path], layers: tuple[int, ...]
) -> None:
    import torch

    theirs, folder = reference
    tokens = np.random.default_rng(1).integers(1, 99, (len(REAL), T))
    real = np.arange(T)[None] < np.array(REAL)[:, None]
    tokens = np.where(real, tokens, 0)
    with torch.no_grad():
        given = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(real.astype(np.int64))}
        states = theirs(**given, output_hidden_states=True).hidden_states
    expected = np.concatenate([states[k].numpy() for k in layers], axis=-1)
    model = ours(folder, max(layers))
    kept = {int(name.split(".")[1]) for name in model.weights if name.startswith("layers.")}
    assert kept == set(range(max(layers))) and "lm_head.weight" not in model.weights
    assert ("norm.weight" in model.weights) is (ALL in layers)
    mine = np.array(model.encode(mx.array(tokens), mx.array(real), layers))
    assert mine.shape == (len(REAL), T, len(layers) * 48)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(mine, expected, atol=1e-4, rtol=1e-4)
