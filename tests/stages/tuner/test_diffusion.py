from __future__ import annotations

import functools
import itertools
import math
from typing import get_args

import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from data.research.pages.recipe import RIVALS
from stages.tuner import diffusion, draws
from stages.tuner.diffusion import BASES, WEIGHTS, Shift, SigmaDistribution, stratified_uniform, weight

NAMES_ELSEWHERE = RIVALS["noise_names"]  # trainer -> its name -> our base
ALL = [SigmaDistribution(base, 0.3, 0.8, shift, 3.0, 1.1) for base, shift in itertools.product(BASES, get_args(Shift))]
NAMES = [f"{n.base}-{n.shift}" for n in ALL]


def cumulative(noise: SigmaDistribution, tokens: int = 4096) -> tuple[np.ndarray, np.ndarray]:
    """(sigma, the share of the density below it). Steps shrink towards both ends, where some densities have no bound."""
    x = np.linspace(0, 1, 200_001)
    middle = (x[1:] + x[:-1]) / 2
    sigma = middle**3 * (10 - 15 * middle + 6 * middle**2)
    mass = noise.density(sigma, tokens) * 30 * (middle * (1 - middle)) ** 2 / 200_000
    return x**3 * (10 - 15 * x + 6 * x**2), np.concatenate([[0], np.cumsum(mass)])


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


def test_the_shift_by_resolution_is_flux_1s_line_and_moves_the_median_as_the_formula_says():
    noise = SigmaDistribution(shift="resolution")
    assert [round(noise.shift_strength(tokens), 2) for tokens in (256, 1024, 2304, 4096)] == [1.65, 1.88, 2.33, 3.16]
    assert noise.shift_strength(4096) == pytest.approx(math.exp(1.15))
    assert SigmaDistribution("logit_normal", shift="static", factor=3.0).sigma(0.5, 256) == 0.75


def test_a_sigma_is_a_float32_from_0_to_1_so_that_the_table_holds_it_exactly():
    for noise, u in itertools.product(ALL, (0.0, 2**-53, draws.uniform(0, "sigma", 1), 1 - 2**-53)):
        sigma = noise.sigma(u, 4096)
        assert 0 <= sigma <= 1 and sigma == float(np.float32(sigma)), noise


def test_each_window_of_steps_fills_every_stratum_once():
    for number in (0, 1):
        us = np.array([stratified_uniform(7, step, number, 8) for step in range(1, 33)]).reshape(4, 8)
        assert (np.sort((us * 8).astype(int), axis=1) == np.arange(8)).all()
        assert len({tuple((window * 8).astype(int)) for window in us}) == 4, "the order is drawn for each window"


FINE = (np.arange(100_000) + 0.5) / 100_000


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_is_finite_not_negative_and_of_mean_one_over_uniform_sigmas_so_that_lr_keeps_its_meaning(name):
    found = weight(name, np.linspace(0, 1, 1001))
    assert np.isfinite(found).all() and (found >= 0).all()
    assert weight(name, 0.25).shape == ()
    if name not in ("half_bell", "sigma_sqrt"):
        assert weight(name, FINE).mean() == pytest.approx(1, abs=6e-4)


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


LOSSES = {
    "mse": diffusion.mse,
    "pseudo_huber": functools.partial(diffusion.pseudo_huber, c=mx.array(0.1)),
}


def pair(dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(0)
    v, target = (mx.array(rng.normal(size=(3, 4, 5)), dtype) for _ in range(2))
    return v, target


def test_mse_equals_torchs_for_each_sample():
    import torch

    v, target = pair()
    reference = torch.nn.functional.mse_loss(torch.tensor(np.array(v)), torch.tensor(np.array(target)), reduction="none")
    np.testing.assert_allclose(np.array(diffusion.mse(v, target)), reference.mean(dim=(1, 2)).numpy(), rtol=1e-6)


def test_pseudo_huber_equals_its_formula_and_both_of_its_limits_far_below_c_too():
    v, target = pair()
    d = np.array(v, np.float64) - np.array(target, np.float64)
    found = np.array(diffusion.pseudo_huber(v, target, mx.array(0.1)))
    np.testing.assert_allclose(found, (0.2 * (np.sqrt(d**2 + 0.01) - 0.1)).mean(axis=(1, 2)), rtol=1e-6)
    wide, narrow = (np.array(diffusion.pseudo_huber(v, target, mx.array(c))) for c in (1e3, 1e-4))
    np.testing.assert_allclose(wide, (d**2).mean(axis=(1, 2)), rtol=1e-4)
    np.testing.assert_allclose(narrow, 2e-4 * np.abs(d).mean(axis=(1, 2)), rtol=2e-3)
    tiny = mx.full((1, 1, 1), 1e-5)  # the formula as it is written on paper gives 0 here, in float32
    assert diffusion.pseudo_huber(tiny, mx.zeros((1, 1, 1)), mx.array(1.0)).item() == pytest.approx(1e-10, rel=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_is_finite_where_the_prediction_is_exact(name):
    v, target = pair()
    for mask in ({}, {"mask_BL": mx.zeros((3, 4))}, {"mask_BL": mx.ones((3, 4))}):
        for at in (v, target):
            value, grad = mx.value_and_grad(lambda v, mask=mask: LOSSES[name](v, target_BLC=target, **mask).mean())(at)
            assert mx.isfinite(value).item() and mx.all(mx.isfinite(grad)).item()
    assert mx.abs(grad).max().item() == 0, "and zero there"


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_float32_whatever_the_model_computed_in(name):
    v, target = pair(mx.bfloat16)
    found = LOSSES[name](v, target_BLC=target)
    assert found.dtype == mx.float32 and found.shape == (3,)
    wide = LOSSES[name](v.astype(mx.float32), target_BLC=target.astype(mx.float32))
    assert mx.array_equal(found, wide)


@pytest.mark.parametrize("name", LOSSES)
def test_a_masked_loss_is_the_mean_over_the_tokens_of_the_mask_by_their_proportion(name):
    v, target = pair()
    mask_BL = mx.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]], mx.float32)
    found = np.array(LOSSES[name](v, target_BLC=target, mask_BL=mask_BL))
    for sample, shown in enumerate(([0, 1], [0, 1, 2, 3], [3])):
        only = LOSSES[name](v[sample : sample + 1, mx.array(shown)], target_BLC=target[sample : sample + 1, mx.array(shown)])
        assert found[sample] == pytest.approx(only.item(), rel=1e-6)
    grad = mx.grad(lambda v: LOSSES[name](v, target_BLC=target, mask_BL=mask_BL).sum())(v)
    assert mx.abs(grad * (mask_BL == 0)[:, :, None]).max().item() == 0
    uneven_BL = mx.array(np.random.default_rng(1).uniform(0.1, 1, (3, 4)), mx.float32)
    whole, half = (np.array(LOSSES[name](v, target_BLC=target, mask_BL=uneven_BL * scale)) for scale in (1.0, 0.5))
    np.testing.assert_allclose(whole, half, rtol=1e-6)
    assert not np.allclose(whole, np.array(LOSSES[name](v, target_BLC=target)), rtol=1e-3)


def test_a_weight_multiplies_the_loss_of_its_sample():
    v, target = pair()
    found = diffusion.mse(v, target, weight_B=mx.array([0.0, 1.0, 2.0]))
    np.testing.assert_allclose(np.array(found), np.array([0.0, 1.0, 2.0]) * np.array(diffusion.mse(v, target)), rtol=1e-6)
