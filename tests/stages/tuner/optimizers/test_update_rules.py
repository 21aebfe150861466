"""Each optimizer beside its reference over 50 steps: a program where there is one, else the published formula in numpy."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.optimizers.adafactor import Adafactor
from stages.tuner.optimizers.adamw import AdamW
from stages.tuner.optimizers.lion import Lion
from stages.tuner.optimizers.prodigy import Prodigy

SHAPES = {"a": (6, 4), "b": (5,), "c": (3, 8)}
TARGETS = {name: np.random.default_rng(n).normal(size=shape) for n, (name, shape) in enumerate(SHAPES.items())}
STEPS = 50
D0 = 1e-3  # of Prodigy: by its 1e-6, first steps are of so few float32 digits that no two programs agree


def start() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(9)
    return {name: (0.1 * draw.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}


def gradient(params: dict, step: int) -> dict[str, np.ndarray]:
    """The noisy gradient of a stretched distance to TARGETS at `params`."""
    draw = np.random.default_rng(100 + step)
    return {
        name: (
            (np.array(params[name], np.float64) - TARGETS[name]) * np.linspace(0.1, 3, TARGETS[name].size).reshape(SHAPES[name])
            + 0.3 * draw.normal(size=SHAPES[name])
        ).astype(np.float32)
        for name in SHAPES
    }


def rate(step: int) -> float:
    return 1e-2 * min(step / 10, 1.0) * 0.99**step


def run(method, lr, steps=STEPS):
    params = {name: mx.array(value) for name, value in start().items()}
    state, path = method.init(params), []
    for step in range(1, steps + 1):
        grads = {name: mx.array(value) for name, value in gradient(params, step).items()}
        params, state = method.update(params, grads, state, lr(step))
        path.append({name: np.array(value) for name, value in params.items()})
    return path, state


def run_torch(make, lr):
    """The arrays after each step of a torch optimizer; the vector does not decay, as in ours."""
    import torch

    params = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start().items()}
    reference, path = make([params["a"], params["c"]], [params["b"]]), []
    for step in range(1, STEPS + 1):
        grads = gradient({name: value.detach().numpy() for name, value in params.items()}, step)
        for name, value in params.items():
            value.grad = torch.tensor(grads[name])
        for group in reference.param_groups:
            group["lr"] = lr(step)
        reference.step()
        path.append({name: value.detach().numpy().copy() for name, value in params.items()})
    return path


def compare(path, other, rtol=2e-5, atol=1e-6):
    for mine, theirs in zip(path, other, strict=True):
        for name in SHAPES:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=rtol, atol=atol)
    assert any(np.abs(path[-1][name] - start()[name]).max() > 0.01 for name in SHAPES)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_equals_torchs_except_that_vectors_do_not_decay(weight_decay):
    import torch

    def make(matrices, vectors):
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-8)

    path, state = run(AdamW(0.9, 0.99, 1e-8, weight_decay), rate)
    compare(path, run_torch(make, rate))
    assert state["step"].item() == STEPS


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"beta1": 0.9}])
def test_adafactor_equals_that_of_transformers(options):
    from transformers.optimization import Adafactor as Reference

    def make(matrices, vectors):
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return Reference(groups, lr=1e-2, **{"beta1": None, "scale_parameter": False, "relative_step": False, **options})

    path, _ = run(Adafactor(**options), rate)
    compare(path, run_torch(make, rate))


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_lion_equals_its_formula(weight_decay):
    params = {name: value.astype(np.float64) for name, value in start().items()}
    moments, path = {name: np.zeros(shape) for name, shape in SHAPES.items()}, []
    for step in range(1, STEPS + 1):
        grads, eta = gradient(params, step), rate(step)
        for name, grad in grads.items():
            direction = np.sign(0.9 * moments[name] + 0.1 * grad)
            decayed = weight_decay * params[name] if params[name].ndim > 1 else 0
            params[name] = params[name] - eta * (direction + decayed)
            moments[name] = 0.99 * moments[name] + 0.01 * grad
        path.append({name: value.copy() for name, value in params.items()})
    found, _ = run(Lion(weight_decay=weight_decay), rate)
    compare(found, path)


def prodigy_in_numpy(lr, weight_decay, d_coef):
    """The authors' published procedure with bias correction and safeguard_warmup, in float64, all arrays as one vector."""
    names = list(SHAPES)
    flat = np.concatenate([start()[name].ravel() for name in names]).astype(np.float64)
    matrix = np.concatenate([np.full(math.prod(SHAPES[name]), float(len(SHAPES[name]) > 1)) for name in names])
    ends = np.cumsum([math.prod(SHAPES[name]) for name in names])[:-1]

    def split(vector):
        return {name: part.reshape(SHAPES[name]) for name, part in zip(names, np.split(vector, ends), strict=True)}

    x0, x, m, v, s = flat, flat, 0 * flat, 0 * flat, 0 * flat
    d = d_max = D0
    numerator, b1, b2, b3 = 0.0, 0.9, 0.999, math.sqrt(0.999)
    path = []
    for k in range(STEPS):
        g = np.concatenate([gradient(split(x), k + 1)[name].ravel() for name in names]).astype(np.float64)
        step = d * lr(k + 1) * math.sqrt(1 - b2 ** (k + 1)) / (1 - b1 ** (k + 1))
        numerator = b3 * numerator + d / D0 * step * (g @ (x0 - x))
        m, v = b1 * m + (1 - b1) * d * g, b2 * v + (1 - b2) * d**2 * g**2
        s = b3 * s + d / D0 * d * g
        estimate = d_coef * numerator / np.abs(s).sum()
        d = d_max = max(d_max, estimate)
        x = x - step * weight_decay * matrix * x - step * m / (np.sqrt(v) + d * 1e-8)
        path.append(split(x) | {"d": d})
    return path


@pytest.mark.parametrize(("d_coef", "weight_decay"), [(1.0, 0.0), (2.0, 0.1)])
def test_prodigy_equals_its_authors_procedure(d_coef, weight_decay, monkeypatch):
    def lr(step):
        return 0.2 + 0.8 * min(step / 10, 1.0)

    monkeypatch.setattr("stages.tuner.optimizers.prodigy.D0", D0)
    expected = prodigy_in_numpy(lr, weight_decay, d_coef)
    path, state = run(Prodigy(d_coef=d_coef, weight_decay=weight_decay), lr)
    assert state["d"].item() == pytest.approx(expected[-1]["d"], rel=1e-4)
    assert state["d"].item() > 5 * D0
    compare(path, expected, rtol=1e-4, atol=2e-5)
