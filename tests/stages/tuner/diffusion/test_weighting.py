from typing import get_args

import numpy as np
import pytest

from stages.tuner.diffusion.weighting import WEIGHTS, WeightName, weight

FINE = (np.arange(100_000) + 0.5) / 100_000


def test_every_weighting_that_can_be_named_exists():
    assert get_args(WeightName) == tuple(WEIGHTS)


@pytest.mark.parametrize("name", [name for name in WEIGHTS if name not in ("half_bell", "sigma_sqrt")])
def test_a_weight_has_mean_one_over_uniform_sigmas_so_that_lr_keeps_its_meaning(name):
    assert weight(name, FINE).mean() == pytest.approx(1, abs=6e-4)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_is_finite_and_not_negative_at_every_level(name):
    found = weight(name, np.linspace(0, 1, 1001))
    assert np.isfinite(found).all() and (found >= 0).all()
    assert weight(name, 0.25).shape == ()


def test_the_bells_are_those_of_ai_toolkit():
    """Its formula over the index i of a table from sigma 1 down."""
    i = np.arange(1000)
    y = np.exp(-2 * ((i - 500) / 1000) ** 2)
    y -= y.min()
    y *= 1000 / y.sum()
    half = np.where(i >= 500, y.max(), y)
    np.testing.assert_allclose(weight("bell", 1 - i / 1000), y, atol=2e-5)
    np.testing.assert_allclose(weight("half_bell", 1 - i / 1000), half, atol=2e-5)
    assert weight("half_bell", FINE).mean() == pytest.approx(1.29, abs=1e-3)


def test_the_measured_weight_is_near_the_values_read_from_its_table():
    """By index, from sigma 1 down; the bound is the one that the file states, of all 1000."""
    table = {0: 0.906, 50: 1.375, 100: 1.507, 124: 1.5227, 200: 1.441, 300: 1.264, 400: 1.083, 500: 0.925}
    table |= {600: 0.805, 700: 0.731, 800: 0.716, 900: 0.716, 997: 0.4448}
    for index, value in table.items():
        assert weight("measured", 1 - index / 1000) == pytest.approx(value, abs=0.023), index


def test_cosmap_and_sigma_sqrt_are_their_formulas():
    np.testing.assert_allclose(weight("cosmap", np.array([0, 0.5, 1])), np.array([2, 4, 2]) / np.pi)
    np.testing.assert_allclose(weight("sigma_sqrt", np.array([0, 0.001, 0.5, 1])), [1e6, 1e6, 4, 1])


def test_an_unknown_weight_is_refused():
    with pytest.raises(KeyError):
        weight("bel", 0.5)
