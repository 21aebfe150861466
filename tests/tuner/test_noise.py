import itertools
import math

import numpy as np
import pytest

from stages.tuner import draws
from stages.tuner.noise import BASES, SHIFTS, Noise

ALL = [Noise(base, 0.3, 0.8, shift, 3.0) for base, shift in itertools.product(BASES, SHIFTS)]


@pytest.mark.parametrize("noise", ALL, ids=lambda n: f"{n.base}-{n.shift}")
def test_a_distribution_draws_what_its_density_says(noise):
    drawn = np.array([noise.draw(draws.generator(0, "sigma", step, 0), 4096) for step in range(8000)])
    assert drawn.min() > 0
    assert drawn.max() < 1
    edges = np.linspace(0, 1, 11)
    fine = (np.arange(100_000) + 0.5) / 100_000
    expected = noise.density(fine, 4096).reshape(10, -1).mean(axis=1) / 10
    assert expected.sum() == pytest.approx(1, abs=1e-3)
    found = np.histogram(drawn, edges)[0] / len(drawn)
    np.testing.assert_allclose(found, expected, atol=0.017)


def test_the_shift_by_resolution_is_flux_1s_line():
    noise = Noise(shift="resolution")
    assert [round(noise.strength(tokens), 2) for tokens in (256, 1024, 2304, 4096)] == [1.65, 1.88, 2.33, 3.16]
    assert noise.strength(4096) == pytest.approx(math.exp(1.15))


def test_a_shift_moves_the_median_as_the_formula_says():
    drawn = [Noise("logit_normal", shift="static", factor=3.0).draw(draws.generator(1, "sigma", n), 256) for n in range(4000)]
    assert np.median(drawn) == pytest.approx(0.75, abs=0.02)


def test_a_sigma_is_a_float32_so_that_the_table_holds_it_exactly():
    sigma = Noise("logit_normal").draw(draws.generator(0, "sigma", 1), 64)
    assert sigma == float(np.float32(sigma))
