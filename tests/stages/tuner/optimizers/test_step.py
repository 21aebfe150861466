"""The whole of an optimizer's step, for every method: stacks, clipping, skipped steps, checkpoints."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from pipeline.project.recipe import recorded
from stages.tuner import checkpoint
from stages.tuner.adapters.lora import A, B
from stages.tuner.checkpoint import OPTIMIZER, Checkpoint
from stages.tuner.config import OptimizerConfig
from stages.tuner.optimizers import METHODS, make_optimizer
from stages.tuner.optimizers import step as step_module
from stages.tuner.optimizers.adamw import AdamW
from stages.tuner.optimizers.step import EMA_COUNT, Averaged, OptimizerStep, Stacks, averages, clip_factor, global_norm, is_finite

SHAPES = {f"blocks.{n}.{part}": shape for n in range(4) for part, shape in (("A", (4, 96)), ("B", (80, 4)), ("m", (6,)))}
TRUE = mx.array(True)
every = pytest.mark.parametrize("name", METHODS)


def draw(step: int) -> dict[str, mx.array]:
    each = np.random.default_rng(step)
    return {name: mx.array(each.normal(size=shape).astype(np.float32)) for name, shape in SHAPES.items()}


def same(these, those):
    return set(these) == set(those) and all(
        these[name].dtype == those[name].dtype and mx.array_equal(these[name], those[name]) for name in those
    )


@every
def test_a_run_resumed_from_a_checkpoint_ends_with_the_same_bits(name, tmp_path):
    def reread(arrays):
        """As a checkpoint writes and reads them: a dict in another order."""
        checkpoint.write_arrays(tmp_path / OPTIMIZER, arrays, {})
        return Checkpoint(1, tmp_path, {}).arrays(OPTIMIZER)

    method = Averaged(make_optimizer(name, weight_decay=0.01))
    step, ends = OptimizerStep(method, 1.0), []
    for cut in (None, 4):
        params = Stacks.of(draw(0))
        state = step.method.init(params.arrays)
        for n in range(1, 9):
            params, state, _, _ = step(params, draw(n), state, method.method.usual_lr * n, TRUE)
            if n == cut:
                params, state, step = Stacks.of(reread(params.unstack())), reread(state), OptimizerStep(method, 1.0)
        ends.append(params.unstack() | state)
    assert same(*ends)


@pytest.mark.parametrize(("name", "settings"), [*((name, {}) for name in METHODS), ("adafactor", {"beta1": 0.9})])
@pytest.mark.parametrize("before", [0, 1])
def test_a_step_with_losses_or_gradients_not_finite_changes_nothing_even_as_the_first(name, settings, before):
    step = OptimizerStep(Averaged(make_optimizer(name, weight_decay=0.1, **settings)), 1.0)
    params = Stacks.of(draw(0))
    state = step.method.init(params.arrays)
    for _ in range(before):
        params, state, _, done = step(params, draw(1), state, 1e-3, TRUE)
        assert done.item()
    broken = draw(2) | {"blocks.1.A": mx.full((4, 96), float("nan"))}
    for grads, losses_finite in ((draw(2), mx.array(False)), (broken, TRUE)):
        copied = Stacks(params.groups, dict(params.arrays))
        after, moments, _, done = step(copied, dict(grads), dict(state), 1e-3, losses_finite)
        assert not done.item()
        assert same(after.unstack(), params.unstack())
        assert same(moments, state)


def test_is_finite_checks_the_norm_of_the_arrays_and_the_scalars_of_the_state():
    state = OptimizerStep(make_optimizer("prodigy"), 1.0).method.init(Stacks.of(draw(0)).arrays)
    assert is_finite(draw(0), state).item()
    assert not is_finite(draw(0), state | {"d": mx.array(float("inf"))}).item()
    for value in (float("nan"), float("inf"), -1e30):  # the last's square is infinite
        assert not is_finite(draw(0) | {"blocks.1.m": mx.full((6,), value)}, state).item()


@every
def test_stacked_arrays_are_updated_as_single_arrays_are(name):
    method = make_optimizer(name, weight_decay=0.01)
    step, lr = OptimizerStep(method, 1.0), method.usual_lr
    params, other = Stacks.of(draw(0)), draw(0)
    state, alone = step.method.init(params.arrays), method.init(other)
    for n in range(1, 6):
        norm = global_norm(draw(n))
        params, state, found, _ = step(params, draw(n), state, lr, TRUE)
        clipped = {key: clip_factor(norm, 1.0) * grad for key, grad in draw(n).items()}
        other, alone = method.update(other, clipped, alone, lr)
        assert found.item() == pytest.approx(norm.item(), rel=1e-6)
    for key in SHAPES:  # 8-bit blocks have other neighbours in a stack
        np.testing.assert_allclose(
            np.array(params.unstack()[key]), np.array(other[key]), atol=(0.3 if "8bit" in name else 1e-4) * lr
        )


def test_a_compiled_step_equals_one_that_is_not(monkeypatch):
    """For one optimizer and one shape, as a C++ compiler takes its time; last bits differ, since operations are fused."""
    method, ends = make_optimizer("adamw8bit"), []
    params, grads = ({key: value for key, value in draw(n).items() if key.endswith("A")} for n in (0, 1))
    for compiled in (False, True):
        monkeypatch.setattr(step_module, "compiles", lambda compiled=compiled: compiled)
        step = OptimizerStep(method, 1.0)
        held = Stacks.of(params)
        ends.append(step(held, dict(grads), step.method.init(held.arrays), 1.0, TRUE)[0].unstack())
    for key in params:
        np.testing.assert_allclose(np.array(ends[1][key]), np.array(ends[0][key]), atol=1e-5)


def test_clipping_equals_torchs_leaves_a_small_gradient_unchanged_and_never_happens_with_a_largest_norm_of_zero():
    import torch

    for size in (0.01, 100.0):
        grads = {name: value * size for name, value in draw(3).items()}
        theirs = [torch.nn.Parameter(torch.zeros(value.shape)) for value in grads.values()]
        for parameter, value in zip(theirs, grads.values(), strict=True):
            parameter.grad = torch.tensor(value)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        ours = {name: mx.array(value) for name, value in grads.items()}
        assert global_norm(ours).item() == pytest.approx(norm.item(), rel=1e-6)
        shrink = clip_factor(global_norm(ours), 1.0)
        for parameter, value in zip(theirs, ours.values(), strict=True):
            np.testing.assert_allclose(np.array(shrink * value), parameter.grad.numpy(), rtol=1e-6)
    assert global_norm({"a": mx.ones(1001, mx.bfloat16)}).item() == pytest.approx(1001**0.5, rel=1e-6), "summed in float32"
    many = {str(n): mx.array(np.random.default_rng(n).normal(size=7).astype(np.float32)) for n in range(40)}
    assert global_norm(many).item() == global_norm(dict(reversed(many.items()))).item(), "a file has them in another order"
    assert clip_factor(mx.array(100.0), 0).item() == 1


class Follow:
    coupled = False

    def init(self, params):
        return {}

    def update(self, params, grads, state, lr, apply=True):
        return grads, {}


def averaged(values, start):
    method = Averaged(Follow(), 0.99)
    state = method.init({"a": start})
    for value in values:
        state = method.update({"a": start}, {"a": mx.array(value)}, state, 0.0)[1]
    return state


@pytest.mark.parametrize("count", [1, 6, 1200])
def test_the_average_equals_its_formula_during_and_after_the_warm_up_and_a_constant_to_the_last_bit(count):
    draw, expected = np.random.default_rng(0), np.zeros(4)
    values = [draw.normal(size=4).astype(np.float32) for _ in range(count)]
    for n, value in enumerate(values):
        keep = min(0.99, (1 + n) / (10 + n))
        expected = keep * expected + (1 - keep) * value
    state = averaged(values, mx.zeros(4))
    np.testing.assert_allclose(np.array(averages(state)["a"]), expected, rtol=1e-5, atol=1e-6)
    assert state[EMA_COUNT].item() == count
    value = mx.array([0.1, -1 / 3, 1e-20])
    assert mx.array_equal(averages(averaged([value] * min(count, 20), value))["a"], value)


def test_lora_plus_is_the_optimizer_of_peft_with_two_rates():
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer

    lr, ratio, decay = 1e-3, 16.0, 0.01
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(12, 12, bias=False)), LoraConfig(r=12, target_modules=["0"]))
    theirs = create_loraplus_optimizer(model, torch.optim.AdamW, lr=lr, loraplus_lr_ratio=ratio, loraplus_weight_decay=decay)
    factors = {("a" + (A if "lora_A" in name else B)): value for name, value in model.named_parameters() if value.requires_grad}
    # A and B have one shape here, and yet no stack in common.
    ours = OptimizerStep(AdamW(weight_decay=decay), 0.0, ratio)
    params = Stacks.of({name: mx.array(value.detach().numpy()) for name, value in factors.items()}, ours.apart)
    assert len(params.groups) == 2
    state, generator = ours.method.init(params.arrays), np.random.default_rng(0)
    for _ in range(20):
        grads = {name: generator.normal(size=tuple(value.shape)).astype(np.float32) for name, value in factors.items()}
        for name, value in factors.items():
            value.grad = torch.from_numpy(grads[name])
        theirs.step()
        params, state, _, _ = ours(params, {name: mx.array(value) for name, value in grads.items()}, state, lr, TRUE)
    for name, value in params.unstack().items():
        np.testing.assert_allclose(np.array(value), factors[name].detach().numpy(), atol=1e-5)
    with pytest.raises(ValueError, match="lr_ratio must be 1 with kind"):
        OptimizerConfig(kind="prodigy", lr_ratio=16.0)
    assert "lr_ratio" not in recorded(OptimizerConfig()) and recorded(OptimizerConfig(lr_ratio=16.0))["lr_ratio"] == 16.0
