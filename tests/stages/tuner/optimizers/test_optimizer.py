import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.optimizers.adamw import AdamW
from stages.tuner.optimizers.step import clip_factor, global_norm

SHAPES = {"a": (5, 3), "b": (4,)}


def gradient(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    return {name: (draw.normal(size=shape) * 10.0 ** draw.integers(-4, 2)).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_follows_torch_over_fifty_steps_and_vectors_do_not_decay(weight_decay):
    import torch

    start = gradient(1000)
    theirs = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start.items()}
    groups = [{"params": [theirs["a"]], "weight_decay": weight_decay}, {"params": [theirs["b"]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99), eps=1e-8)
    ours = {name: mx.array(value) for name, value in start.items()}
    adamw = AdamW(0.9, 0.99, 1e-8, weight_decay)
    state = adamw.init(ours)
    for step in range(1, 51):
        lr = 1e-2 / step
        for group in reference.param_groups:
            group["lr"] = lr
        grads = gradient(step)
        for name, value in theirs.items():
            value.grad = torch.tensor(grads[name])
        reference.step()
        ours, state = adamw.update(ours, {name: mx.array(value) for name, value in grads.items()}, state, lr)
        for name, value in theirs.items():
            np.testing.assert_allclose(np.array(ours[name]), value.detach().numpy(), rtol=2e-6, atol=1e-7)
    assert state["step"].item() == 50


def test_the_state_is_flat_and_of_arrays_only():
    state = AdamW().init({"a": mx.ones((2, 3))})
    assert set(state) == {"step", "a.m", "a.v"}
    assert all(isinstance(value, mx.array) for value in state.values())


def test_clipping_follows_torch_and_leaves_a_small_gradient_as_it_is():
    import torch

    for size in (0.01, 100.0):
        grads = {name: value * size for name, value in gradient(3).items()}
        theirs = [torch.nn.Parameter(torch.zeros(value.shape)) for value in grads.values()]
        for parameter, value in zip(theirs, grads.values(), strict=True):
            parameter.grad = torch.tensor(value)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        ours = {name: mx.array(value) for name, value in grads.items()}
        assert global_norm(ours).item() == pytest.approx(norm.item(), rel=1e-6)
        shrink = clip_factor(global_norm(ours), 1.0)
        for parameter, value in zip(theirs, ours.values(), strict=True):
            np.testing.assert_allclose(np.array(shrink * value), parameter.grad.numpy(), rtol=1e-6)


def test_a_limit_of_zero_never_clips():
    assert clip_factor(mx.array(100.0), 0).item() == 1


def test_the_norm_does_not_depend_on_the_order_of_the_dict():
    grads = {str(n): mx.array(np.random.default_rng(n).normal(size=7).astype(np.float32)) for n in range(40)}
    norms = {global_norm({n: grads[n] for n in order}).item() for order in (list(grads), list(grads)[::-1], sorted(grads))}
    assert len(norms) == 1


def test_the_norm_of_bfloat16_gradients_is_summed_in_float32():
    grads = {"a": mx.full((10000,), 1.0, mx.bfloat16)}
    assert global_norm(grads).item() == 100
