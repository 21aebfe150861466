import functools

import mlx.core as mx
import numpy as np
import pytest
import torch

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.diffusion import loss

LOSSES = {
    "mse": functools.partial(loss.mse),
    "pseudo_huber": functools.partial(loss.pseudo_huber, c=mx.array(0.1)),
}


def pair(dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(0)
    v, target = (mx.array(rng.normal(size=(3, 4, 5)), dtype) for _ in range(2))
    return v, target


def test_mse_equals_torchs_for_each_sample():
    v, target = pair()
    reference = torch.nn.functional.mse_loss(torch.tensor(np.array(v)), torch.tensor(np.array(target)), reduction="none")
    np.testing.assert_allclose(np.array(loss.mse(v, target)), reference.mean(dim=(1, 2)).numpy(), rtol=1e-6)


def test_pseudo_huber_equals_its_formula_and_both_of_its_limits():
    v, target = pair()
    d = np.array(v, np.float64) - np.array(target, np.float64)
    found = np.array(loss.pseudo_huber(v, target, mx.array(0.1)))
    np.testing.assert_allclose(found, (0.2 * (np.sqrt(d**2 + 0.01) - 0.1)).mean(axis=(1, 2)), rtol=1e-6)
    wide, narrow = (np.array(loss.pseudo_huber(v, target, mx.array(c))) for c in (1e3, 1e-4))
    np.testing.assert_allclose(wide, (d**2).mean(axis=(1, 2)), rtol=1e-4)
    np.testing.assert_allclose(narrow, 2e-4 * np.abs(d).mean(axis=(1, 2)), rtol=2e-3)


def test_pseudo_huber_keeps_differences_far_below_c():
    """The formula as it is written on paper gives 0 here, in float32."""
    tiny = mx.full((1, 1, 1), 1e-5)
    assert loss.pseudo_huber(tiny, mx.zeros((1, 1, 1)), mx.array(1.0)).item() == pytest.approx(1e-10, rel=1e-4)


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
def test_a_masked_loss_counts_the_tokens_of_the_mask_only(name):
    v, target = pair()
    mask_BL = mx.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]], mx.float32)
    found = np.array(LOSSES[name](v, target_BLC=target, mask_BL=mask_BL))
    for sample, shown in enumerate(([0, 1], [0, 1, 2, 3], [3])):
        only = LOSSES[name](v[sample : sample + 1, mx.array(shown)], target_BLC=target[sample : sample + 1, mx.array(shown)])
        assert found[sample] == pytest.approx(only.item(), rel=1e-6)
    grad = mx.grad(lambda v: LOSSES[name](v, target_BLC=target, mask_BL=mask_BL).sum())(v)
    assert mx.abs(grad * (mask_BL == 0)[:, :, None]).max().item() == 0


def test_a_masks_mass_is_divided_out_so_that_its_scale_changes_nothing():
    v, target = pair()
    mask_BL = mx.array(np.random.default_rng(1).uniform(0.1, 1, (3, 4)), mx.float32)
    whole, half = (np.array(loss.mse(v, target, mask_BL=mask_BL * scale)) for scale in (1.0, 0.5))
    np.testing.assert_allclose(whole, half, rtol=1e-6)
    np.testing.assert_allclose(np.array(loss.mse(v, target, mask_BL=mx.ones((3, 4)))), np.array(loss.mse(v, target)), rtol=1e-6)


def test_a_weight_multiplies_the_loss_of_its_sample():
    v, target = pair()
    found = loss.mse(v, target, weight_B=mx.array([0.0, 1.0, 2.0]))
    np.testing.assert_allclose(np.array(found), np.array([0.0, 1.0, 2.0]) * np.array(loss.mse(v, target)), rtol=1e-6)


def test_preservation_is_zero_for_the_base_itself_and_pulls_towards_it():
    v, base = pair()
    assert mx.abs(loss.preservation(base, base)).max().item() == 0
    nearer = v - 0.1 * mx.grad(lambda v: loss.preservation(v, base).sum())(v)
    assert (loss.preservation(nearer, base) < loss.preservation(v, base)).all().item()
    np.testing.assert_allclose(np.array(loss.preservation(v, base)), np.array(loss.mse(v, base)))


def test_a_partial_of_arrays_compiles_with_every_keyword():
    v, target = pair()
    given = {"target_BLC": target, "c": mx.array(0.1), "weight_B": mx.ones(3), "mask_BL": mx.ones((3, 4))}
    mx.disable_compile()  # a CPU would call its C++ compiler; the call is what counts here
    try:
        run = mx.compile(lambda v, given: loss.pseudo_huber(v, **given))
        assert mx.array_equal(run(v, given), functools.partial(loss.pseudo_huber, **given)(v))
    finally:
        mx.enable_compile()
