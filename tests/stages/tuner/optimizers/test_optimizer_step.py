"""The whole of a step, for every optimizer: stacks, what is skipped, what a checkpoint brings back."""

import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner import checkpoint
from stages.tuner.adapters import stacks
from stages.tuner.checkpoint import OPTIMIZER, Checkpoint
from stages.tuner.optimizers import ema
from stages.tuner.optimizers import step as step_module
from stages.tuner.optimizers.adamw import AdamW
from stages.tuner.optimizers.methods import METHODS, make_optimizer
from stages.tuner.optimizers.step import OptimizerStep, clip_factor, global_norm, is_finite

SHAPES = {f"blocks.{n}.{part}": shape for n in range(4) for part, shape in (("A", (4, 96)), ("B", (80, 4)), ("m", (6,)))}
TRUE = mx.array(True)
every = pytest.mark.parametrize("name", METHODS)


def draw(step: int) -> dict[str, mx.array]:
    each = np.random.default_rng(step)
    return {name: mx.array(each.normal(size=shape).astype(np.float32)) for name, shape in SHAPES.items()}


def reread(folder, arrays):
    """Written as a checkpoint writes them, and read again: a dict of another order."""
    checkpoint.write_arrays(folder / OPTIMIZER, arrays, {})
    return Checkpoint(1, folder, {}).arrays(OPTIMIZER)


def stacked(n: int) -> stacks.Stacks:
    return stacks.Stacks.of(draw(n))


def copied(params: stacks.Stacks) -> stacks.Stacks:
    """A step empties what it is given."""
    return stacks.Stacks(params.groups, dict(params.arrays))


def same(these, those):
    return set(these) == set(those) and all(
        these[name].dtype == those[name].dtype and mx.array_equal(these[name], those[name]) for name in those
    )


@every
def test_a_run_that_was_saved_and_read_again_ends_with_the_same_bits(name, tmp_path):
    method = ema.Averaged(make_optimizer(name, weight_decay=0.01))
    step, ends = OptimizerStep(method, 1.0), []
    for cut in (None, 4):
        params = stacked(0)
        state = step.init(params)
        for n in range(1, 9):
            params, state, _, _ = step(params, draw(n), state, method.method.usual_lr * n, TRUE)
            if n == cut:
                back = reread(tmp_path, state)
                assert same(back, state)
                params = stacks.Stacks.of(reread(tmp_path, params.unstack()))
                state, step = back, OptimizerStep(method, 1.0)
        ends.append(params.unstack() | state)
    assert same(*ends)


@every
@pytest.mark.parametrize("before", [0, 1])
def test_a_step_that_is_not_sound_changes_nothing_even_as_the_first(name, before):
    step = OptimizerStep(ema.Averaged(make_optimizer(name, weight_decay=0.1)), 1.0)
    params = stacked(0)
    state = step.init(params)
    for _ in range(before):
        params, state, _, done = step(params, draw(1), state, 1e-3, TRUE)
        assert done.item()
    broken = draw(2) | {"blocks.1.A": mx.full((4, 96), float("nan"))}
    for grads, sound in ((draw(2), mx.array(False)), (broken, TRUE)):
        after, moments, _, done = step(copied(params), dict(grads), dict(state), 1e-3, sound)
        assert not done.item()
        assert same(after.unstack(), params.unstack())
        assert same(moments, state)


def test_an_adapter_is_bounded_as_long_as_its_length_and_what_is_estimated_of_all_of_it_are_finite():
    state = OptimizerStep(make_optimizer("prodigy"), 1.0).init(stacked(0))
    assert is_finite(draw(0), state).item()
    assert not is_finite(draw(0), state | {"d": mx.array(float("inf"))}).item()
    for value in (float("nan"), float("inf"), -1e30):  # the last's square is infinite
        assert not is_finite(draw(0) | {"blocks.1.m": mx.full((6,), value)}, state).item()


@every
def test_arrays_in_stacks_go_where_they_would_go_alone(name):
    method = make_optimizer(name, weight_decay=0.01)
    step, lr = OptimizerStep(method, 1.0), method.usual_lr
    params, other = stacked(0), draw(0)
    state, alone = step.init(params), method.init(other)
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


def test_compiled_or_not_it_is_the_same_step(monkeypatch):
    """For one optimizer and one shape, as a C++ compiler takes its time; last bits differ, since operations are fused."""
    method, ends = make_optimizer("adamw8bit"), []
    params, grads = ({key: value for key, value in draw(n).items() if key.endswith("A")} for n in (0, 1))
    for compiled in (False, True):
        monkeypatch.setattr(step_module, "compiles", lambda compiled=compiled: compiled)
        step = OptimizerStep(method, 1.0)
        held = stacks.Stacks.of(params)
        ends.append(step(held, dict(grads), step.init(held), 1.0, TRUE)[0].unstack())
    for key in params:
        np.testing.assert_allclose(np.array(ends[1][key]), np.array(ends[0][key]), atol=1e-5)


def test_matrices_of_one_shape_share_a_stack_and_the_plan_knows_no_order(monkeypatch):
    plan = stacks.group_by_shape(draw(0))
    assert plan["blocks.0.A"] == [f"blocks.{n}.A" for n in range(4)]
    assert plan["blocks.2.m"] == ["blocks.2.m"]
    assert plan == stacks.group_by_shape(dict(reversed(draw(0).items())))
    assert same(stacks.unstack(stacks.stack(draw(0), plan), plan), draw(0))
    monkeypatch.setattr(stacks, "LARGEST", 3 * 4 * 96)
    assert [len(names) for first, names in stacks.group_by_shape(draw(0)).items() if first.endswith("A")] == [3, 1]


def test_the_average_is_an_adapter_like_the_one_that_is_trained():
    step = OptimizerStep(ema.Averaged(AdamW()), 1.0)
    state = step.init(stacked(0))
    assert same(step.average(stacked(0), state), draw(0))
    params, state, _, _ = step(stacked(0), draw(1), state, 1e-2, TRUE)
    average = step.average(params, state)
    assert {name: value.shape for name, value in average.items()} == SHAPES
    np.testing.assert_allclose(  # the first update keeps a tenth
        np.array(average["blocks.3.B"]), np.array(0.1 * draw(0)["blocks.3.B"] + 0.9 * params.unstack()["blocks.3.B"]), rtol=1e-5
    )
    assert OptimizerStep(AdamW(), 1.0).average(params, {"step": mx.zeros(())}) == {}


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        (
            "adamw8bt",
            {},
            "kind must be one of adamw, adamw8bit, adafactor, lion, prodigy, got 'adamw8bt'; did you mean adamw8bit?",
        ),
        ("sgd", {}, "kind must be one of adamw, adamw8bit, adafactor, lion, prodigy, got 'sgd'"),
        ("lion", {"beta_1": 0.9}, "beta_1 is not a setting of lion, which has beta1, beta2, weight_decay; did you mean beta1?"),
        ("adamw", {"eps": 0.0}, "eps must be >= 1e-30, got 0.0"),
        ("lion", {"eps": 1e-8}, "eps is not a setting of lion, which has beta1, beta2, weight_decay"),
        ("adamw", {"beta2": 1.0}, "beta2 must be >= 0 and < 1, got 1.0"),
        ("prodigy", {"weight_decay": -1}, "weight_decay must be >= 0, got -1"),
    ],
)
def test_a_wrong_name_or_number_is_refused_in_one_line(name, numbers, message):
    with pytest.raises(ValueError) as error:
        make_optimizer(name, **numbers)
    assert str(error.value) == message


def test_an_optimizer_is_made_with_the_numbers_given_and_defaults_for_the_rest():
    made = make_optimizer("prodigy", d_coef=0.5, beta3=None)
    assert (made.d_coef, made.beta3, made.beta1, made.usual_lr) == (0.5, None, 0.9, 1.0)
