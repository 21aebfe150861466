"""Predictions block by block are those of the whole model, within the limit of live memory."""

from __future__ import annotations

import mlx.core as mx
import pytest

from stages.tuner.blockwise import backprop
from stages.tuner.blockwise.backprop import model_forward
from tests.stages.tuner.adapters.variants import adapted, batch, tiny


def test_every_block_runs_under_the_limit_of_live_memory_and_the_limit_is_restored(monkeypatch):
    model, seen = tiny(), []
    real = backprop.dispatch
    monkeypatch.setattr(backprop, "dispatch", lambda *given: [seen.append(mx.get_memory_limit()), real(*given)][1])
    predict, before = model_forward(model, None), mx.get_memory_limit()
    predict.live_bytes = 123_456_789
    predict(**batch())
    assert seen == [123_456_789] * (len(model.blocks) + 2)
    assert mx.get_memory_limit() == before


def test_an_adapter_of_another_model_is_refused_by_the_name_of_its_linear():
    model = tiny()
    adapters, scales = adapted(model, "lora")
    name = next(iter(scales))
    wrong = {key: value[..., :-1] if key == f"{name}.lora_A.weight" else value for key, value in adapters.items()}
    with pytest.raises(ValueError, match=f"the adapter's {name} must have the shape"):
        model_forward(model, (wrong, scales))
