import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.optimizers import ema
from stages.tuner.optimizers.adamw import AdamW


def test_the_average_equals_its_formula_during_and_after_the_warm_up():
    draw, expected = np.random.default_rng(0), np.zeros(4)
    state = ema.init_average({"a": mx.zeros(4)})
    for n in range(1200):
        value = draw.normal(size=4).astype(np.float32)
        keep = min(0.99, (1 + n) / (10 + n))
        expected = keep * expected + (1 - keep) * value
        state = ema.update_average({"a": mx.array(value)}, state, 0.99)
        if n in (0, 5, 1199):
            np.testing.assert_allclose(np.array(ema.averages(state)["a"]), expected, rtol=1e-5, atol=1e-6)
    assert state[ema.COUNT].item() == 1200


def test_the_average_of_a_constant_is_the_constant_to_the_last_bit():
    value = {"a": mx.array([0.1, -1 / 3, 1e-20])}
    state = ema.init_average(value)
    for _ in range(20):
        state = ema.update_average(value, state, 0.99)
    assert mx.array_equal(ema.averages(state)["a"], value["a"])


def test_averaging_does_not_change_the_optimizers_result():
    plain, averaged = AdamW(), ema.Averaged(AdamW(), 0.9)
    params = other = {"a": mx.ones((2, 3)), "b": mx.zeros(3)}
    state, both = plain.init(params), averaged.init(params)
    for step in range(5):
        grads = {name: mx.sin(value + step) for name, value in params.items()}
        params, state = plain.update(params, grads, state, 0.1)
        other, both = averaged.update(other, grads, both, 0.1)
    assert all(mx.array_equal(params[name], other[name]) for name in params)
    assert all(mx.array_equal(state[name], both[name]) for name in state)
    average = ema.averages(both)
    assert set(average) == set(params)
    assert not mx.array_equal(average["a"], params["a"])
    assert ema.averages(state) == {}


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_outside_its_bounds_is_refused(decay):
    with pytest.raises(ValueError, match=f"decay must be >= 0 and < 1, got {decay}"):
        ema.Averaged(AdamW(), decay)
