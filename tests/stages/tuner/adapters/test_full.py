import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.adapters import full, lora
from stages.tuner.adapters.initial import fresh_adapter, start_from_adapter
from stages.tuner.adapters.merge import merge
from stages.tuner.adapters.targets import adapter_metadata, select_targets

LINEARS = {"block.0.q": (6, 4), "block.0.o": (4, 6), "head.linear": (3, 4)}


def chosen(**settings):
    return select_targets(LINEARS, ("*",), 2, 4.0, whole=("head.linear",), **settings)


def test_a_linear_that_is_trained_in_full_has_a_difference_of_its_own_shape_and_the_others_an_adapter():
    targets = chosen()
    assert [(t.name, t.variant, t.scale) for t in targets] == [
        ("block.0.q", "lora", 2.0),
        ("block.0.o", "lora", 2.0),
        ("head.linear", "full", 1.0),
    ]
    assert targets[-1].shapes == {full.DIFF: (3, 4)}
    assert "scales" not in adapter_metadata(targets)


def test_a_difference_starts_at_zero_and_is_added_to_the_weight():
    arrays = fresh_adapter(chosen(), seed=0)
    assert not mx.any(arrays["head.linear.diff"]).item()
    rng = np.random.default_rng(0)
    weight, diff, x = (mx.array(rng.normal(size=shape), mx.float32) for shape in ((3, 4), (3, 4), (5, 4)))
    y = lora.adapted_linear({"linear.diff": diff}, {"linear": 1.0})("linear", weight, x)
    assert mx.allclose(y, x @ (weight + diff).T, atol=1e-6).item()
    assert mx.allclose(merge(weight, {full.DIFF: diff}, 1.0), weight + diff).item()
    assert lora.linear_shape({full.DIFF: diff}) == (3, 4)


def test_training_goes_on_from_a_difference_but_not_from_a_lora_of_the_same_linear():
    targets = chosen()
    fresh = fresh_adapter(targets, seed=0)
    diff = mx.full((3, 4), 0.5)
    started = start_from_adapter({"head.linear.diff": diff}, {"head.linear": 1.0}, targets, fresh)
    assert mx.array_equal(started["head.linear.diff"], diff).item()
    pair = {"head.linear" + lora.A: mx.zeros((2, 4)), "head.linear" + lora.B: mx.zeros((3, 2))}
    with pytest.raises(ValueError, match=r"the adapter of head.linear must be a whole difference, got a LoRA"):
        start_from_adapter(pair, {"head.linear": 1.0}, targets, fresh)


def test_a_pattern_of_linears_to_train_in_full_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match="full: 'haed' matches no Linear of the blocks"):
        select_targets(LINEARS, ("*",), 2, whole=("haed",))
