import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.models import attention
from stages.models.attention import exp, sigmoid, silu, softmax
from stages.models.layers import silu_times

X = np.concatenate([np.linspace(-30, 30, 501), [-1e30, -120, -89, -1e-30, 0, 1e-30, 120, 1e30]])


@pytest.fixture(params=[False, True], ids=["mlx", "power"], autouse=True)
def form(request, monkeypatch):
    """Each test runs with MLX's own functions and with powers."""
    monkeypatch.setattr(attention, "slow_exp", lambda x: request.param)
    monkeypatch.setattr("stages.models.layers.slow_exp", lambda x: request.param)


@pytest.mark.parametrize("function", [exp, sigmoid, silu])
def test_exponentials_agree_with_float64_from_the_smallest_to_the_largest_numbers_and_no_number_stays_none(function):
    with np.errstate(over="ignore"):
        share = 1 / (1 + np.exp(-X))
        expected = {exp: np.exp(X), sigmoid: share, silu: X * share}[function].astype(np.float32)
    found = np.array(function(mx.array(X.astype(np.float32))))
    np.testing.assert_allclose(found, expected, rtol=3e-6, atol=1e-35)
    assert np.isnan(function(mx.array([np.nan])).item())


def test_softmax_sums_to_one_and_takes_any_size_of_scores():
    x = mx.array(np.random.default_rng(0).normal(size=(3, 5, 70)).astype(np.float32) * 40 + 1e4)
    found, true = np.array(softmax(x)), np.array(x, np.float64)
    true = np.exp(true - true.max(-1, keepdims=True))
    np.testing.assert_allclose(found, true / true.sum(-1, keepdims=True), rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)


def test_the_gated_product_has_the_gradients_of_its_formula():
    draw = np.random.default_rng(1)
    gate, up, dy = (mx.array(draw.normal(size=(2, 7, 6)).astype(np.float32) * 3) for _ in range(3))
    wide = mx.concatenate([gate, up], axis=-1)
    parts = mx.split(wide, 2, axis=-1)  # views of one array, as in the blocks
    (true,), true_grads = mx.vjp(lambda gate, up: gate * mx.sigmoid(gate) * up, [gate, up], [dy])
    (y,), grads = mx.vjp(silu_times, parts, [dy])
    for found, wanted in zip((y, *grads), (true, *true_grads), strict=True):
        np.testing.assert_allclose(np.array(found), np.array(wanted), rtol=2e-5, atol=2e-6)
