"""The T5 encoder against transformers' own, in float32."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from stages.models.t5 import model as module
from stages.models.t5.model import HEAD, T5, T5Config

MOST, MEAN = 5e-5, 1e-5  # limits of the largest and the mean absolute difference
TINY = {"vocab_size": 99, "d_model": 48, "d_kv": 16, "d_ff": 80, "num_layers": 3, "num_heads": 2}  # 2 * 16 differs from 48
FORMS = {"gated": "gated-gelu", "relu": "relu"}


@functools.lru_cache(maxsize=2)
def reference(form: str) -> tuple[Any, Any]:
    """A random T5 encoder by transformers and a random head, (model, head as NumPy)."""
    import torch
    from transformers import T5Config as TheirConfig
    from transformers import T5EncoderModel

    torch.manual_seed(0)
    model = T5EncoderModel(TheirConfig(**TINY, feed_forward_proj=FORMS[form])).eval()
    for name, tensor in model.named_parameters():
        if "layer_norm" in name:
            tensor.data = 1 + 0.3 * torch.randn_like(tensor)
        if "relative_attention_bias" in name:
            tensor.data = torch.randn_like(tensor)
    return model, np.random.default_rng(0).normal(size=(32, TINY["d_model"])).astype(np.float32) / 8


def ours(model: Any, head: np.ndarray) -> T5:
    config = T5Config.from_dict(model.config.to_dict(), dimensions=len(head))
    arrays = {
        name: mx.array(value.numpy()) for name, value in model.state_dict().items() if name != "encoder.embed_tokens.weight"
    }
    assert {name: value.shape for name, value in arrays.items()} == config.encoder_shapes()
    return T5(config, {**arrays, HEAD: mx.array(head)})


def texts(vocabulary: int, rows: int, length: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and which of them are real; every row has another length."""
    rng = np.random.default_rng(seed)
    real = np.arange(length)[None] < np.linspace(length, 2, rows).astype(int)[:, None]
    return np.where(real, rng.integers(1, vocabulary, (rows, length)), 0), real


def hidden_states(model: T5, ids: np.ndarray, real: np.ndarray) -> np.ndarray:
    h_TD, shared = model.enter([mx.array(ids)], [mx.array(real)])
    for block in model.blocks[:-1]:
        h_TD = model.block(block.kind)(block.weights, h_TD, shared)
    norm = model.blocks[-1].weights["final_layer_norm.weight"]
    return np.array(module.rms_norm(h_TD, norm, model.config.layer_norm_epsilon)).reshape(*ids.shape, -1)


@pytest.mark.parametrize("form", FORMS)
def test_an_encoder_gives_the_hidden_states_of_transformers(form: str) -> None:
    import torch

    model, head = reference(form)
    ids, real = texts(model.config.vocab_size, 5, 150)
    with torch.no_grad():
        theirs = model(torch.tensor(ids), attention_mask=torch.tensor(real).long()).last_hidden_state.numpy()
    apart = np.abs(hidden_states(ours(model, head), ids, real) - theirs)[real]
    assert apart.max() <= MOST
    assert apart.mean() <= MEAN


def test_the_vectors_of_a_text_do_not_depend_on_its_padding_or_its_neighbours() -> None:
    model = ours(*reference("gated"))
    ids, real = texts(99, 4, 40)
    [whole] = model([mx.array(ids)], [mx.array(real)])
    cut = int(real[2].sum())
    other_ids, other_real = texts(99, 3, 17, seed=5)
    _, alone = model([mx.array(other_ids), mx.array(ids[2:3, :cut])], [mx.array(other_real), mx.array(real[2:3, :cut])])
    assert np.abs(np.array(whole[2, :cut]) - np.array(alone[0])).max() <= 5e-6
    assert (np.array(whole)[~real] == 0).all()
    assert np.allclose(np.linalg.norm(np.array(whole)[real], axis=-1), 1, atol=1e-6)
