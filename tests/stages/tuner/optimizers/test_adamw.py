import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.optimizers.adamw import AdamW

SHAPES = {"a": (5, 3), "b": (4,)}


def gradient(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    return {name: (draw.normal(size=shape) * 10.0 ** draw.integers(-4, 2)).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_equals_torchs_over_fifty_steps_except_that_vectors_do_not_decay(weight_decay):
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
