import itertools
import math

import numpy as np
import pytest

from data.pages.recipe import RIVALS
from stages.tuner import draws
from stages.tuner.diffusion.noise import BASES, SHIFTS, SigmaDistribution, stratified_uniform

NAMES_ELSEWHERE = RIVALS["noise_names"]  # trainer -> its name -> our base
ALL = [SigmaDistribution(base, 0.3, 0.8, shift, 3.0, 1.1) for base, shift in itertools.product(BASES, SHIFTS)]
NAMES = [f"{n.base}-{n.shift}" for n in ALL]
DRAWS = 6000


def cumulative(noise: SigmaDistribution, tokens: int = 4096) -> tuple[np.ndarray, np.ndarray]:
    """(sigma, the share of the density below it). Steps shrink towards both ends, where some densities have no bound."""
    x = np.linspace(0, 1, 200_001)
    middle = (x[1:] + x[:-1]) / 2
    sigma = middle**3 * (10 - 15 * middle + 6 * middle**2)
    mass = noise.density(sigma, tokens) * 30 * (middle * (1 - middle)) ** 2 / 200_000
    return x**3 * (10 - 15 * x + 6 * x**2), np.concatenate([[0], np.cumsum(mass)])


@pytest.mark.parametrize("noise", ALL, ids=NAMES)
def test_a_density_integrates_to_one(noise):
    assert cumulative(noise)[1][-1] == pytest.approx(1, abs=2e-5)


@pytest.mark.parametrize("noise", ALL, ids=NAMES)
def test_a_distribution_draws_what_its_density_says(noise):
    """Kolmogorov and Smirnov, at 1 %: a density that is off by a few hundredths fails."""
    drawn = np.sort([noise.sigma(draws.generator(0, "sigma", step, 0).random(), 4096) for step in range(DRAWS)])
    assert drawn[0] >= 0 and drawn[-1] <= 1
    expected = np.interp(drawn, *cumulative(noise))
    found = np.arange(DRAWS + 1) / DRAWS
    assert max((found[1:] - expected).max(), (expected - found[:-1]).max()) < 1.63 / math.sqrt(DRAWS)


@pytest.mark.parametrize("noise", ALL, ids=NAMES)
def test_evenly_spaced_u_give_the_quantiles_of_the_density(noise):
    """Quantiles, to a fraction of a percent, where draws can say no more than a percent. Short of 1 float32 has few levels."""
    levels = np.sort([noise.sigma((n + 0.5) / 500, 1024) for n in range(500)])
    inside = levels < 1 - 1e-6
    shares = (np.arange(500) + 0.5) / 500
    bound = 1.2e-3 if noise.base == "both_ends" else 1e-4  # its two halves give pairs of levels
    np.testing.assert_allclose(np.interp(levels, *cumulative(noise, 1024))[inside], shares[inside], atol=bound)
    assert inside.mean() > 0.98


def test_high_noise_is_ai_toolkits_content_and_low_noise_its_style():
    """It indexes a table from most noise to least by 1000 u^3 for content, by 1000 (1 - u^3) for style."""
    u = (np.arange(4000) + 0.5) / 4000
    for name, index in (("content", 1000 * u**3), ("style", 1000 * (1 - u**3)), ("balanced", 1000 * u)):
        theirs = np.sort(1 - index / 1000)
        ours = np.sort([SigmaDistribution(NAMES_ELSEWHERE["ai-toolkit"][name]).sigma(x, 1024) for x in u])
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_two_trainers_mean_opposite_ends_by_the_same_words():
    """The other draws the timestep itself: content 1000 u^3."""
    u = (np.arange(400) + 0.5) / 400
    mean = {
        (trainer, name): np.mean([SigmaDistribution(base).sigma(x, 1024) for x in u])
        for trainer, names in NAMES_ELSEWHERE.items()
        for name, base in names.items()
    }
    assert mean["ai-toolkit", "content"] == pytest.approx(0.75, abs=2e-3) == mean["flux-2-swift-mlx", "style"]
    assert mean["ai-toolkit", "style"] == pytest.approx(0.25, abs=2e-3) == mean["flux-2-swift-mlx", "content"]
    assert mean["ai-toolkit", "balanced"] == pytest.approx(0.5, abs=2e-3) == mean["flux-2-swift-mlx", "balanced"]
    assert NAMES_ELSEWHERE["ai-toolkit"]["balanced"] != NAMES_ELSEWHERE["flux-2-swift-mlx"]["balanced"]


def test_the_shift_by_resolution_is_flux_1s_line():
    noise = SigmaDistribution(shift="resolution")
    assert [round(noise.shift_strength(tokens), 2) for tokens in (256, 1024, 2304, 4096)] == [1.65, 1.88, 2.33, 3.16]
    assert noise.shift_strength(4096) == pytest.approx(math.exp(1.15))


def test_a_shift_moves_the_median_as_the_formula_says():
    assert SigmaDistribution("logit_normal", shift="static", factor=3.0).sigma(0.5, 256) == 0.75


def test_a_sigma_is_a_float32_so_that_the_table_holds_it_exactly():
    for noise in ALL:
        sigma = noise.sigma(draws.generator(0, "sigma", 1).random(), 64)
        assert sigma == float(np.float32(sigma))


@pytest.mark.parametrize("noise", ALL, ids=NAMES)
def test_u_near_0_and_near_1_gives_a_sigma_from_0_to_1(noise):
    for u in (0.0, 2**-53, 1 - 2**-53):
        assert 0 <= noise.sigma(u, 4096) <= 1


def test_each_window_of_steps_fills_every_stratum_once():
    for number in (0, 1):
        us = np.array([stratified_uniform(7, step, number, 8) for step in range(1, 33)]).reshape(4, 8)
        assert (np.sort((us * 8).astype(int), axis=1) == np.arange(8)).all()
        assert len({tuple((window * 8).astype(int)) for window in us}) == 4, "the order is drawn for each window"


def test_with_one_stratum_each_sample_is_an_independent_draw():
    assert stratified_uniform(7, 5, 2) == draws.uniform(7, "sigma", 5, 2)
    assert stratified_uniform(7, 5, 2) == stratified_uniform(7, 5, 2) != stratified_uniform(7, 6, 2)
    noise = SigmaDistribution("logit_normal", shift="resolution")
    assert noise.sigma(stratified_uniform(7, 5, 2), 1024) == noise.sigma(draws.generator(7, "sigma", 5, 2).random(), 1024)


def test_strata_make_the_mean_of_a_short_run_steadier_without_shifting_it():
    noise = SigmaDistribution("logit_normal", shift="resolution")
    means = {}
    for strata in (1, 16):
        runs = [[noise.sigma(stratified_uniform(seed, step, 0, strata), 1024) for step in range(1, 17)] for seed in range(60)]
        means[strata] = np.mean(runs, axis=1)
    assert means[16].std() < means[1].std() / 5
    assert means[16].mean() == pytest.approx(means[1].mean(), abs=4 * means[1].std() / math.sqrt(60))
