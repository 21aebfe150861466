from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.optimizers.adamw import BLOCK, AdamW, AdamW8bit, dequantize, quantize

BLOCKS = 32
STEPS = (50, 300)
BOUNDS = {0.0: (0.016, 0.016), 1.0: (0.035, 0.052)}  # by spread, after STEPS; data/docs/recipe.md states them
PAGE = (Path(__file__).parents[4] / "data" / "docs" / "recipe.md").read_text(encoding="utf-8")


def drift(spread: float, steps: tuple[int, ...]) -> tuple[list[float], float]:
    """Distance of 8-bit from float32 results as a share of the path, after each of `steps`; and the largest of any value, in lr.

    Gradients have a steady part of 0.3 of their noise; values of a block differ in scale by e^spread.
    """
    draw = np.random.default_rng(1)
    scale = np.exp(draw.normal(size=(BLOCKS, BLOCK)) * spread)
    steady = 0.3 * draw.normal(size=scale.shape) * scale
    methods = (AdamW(), AdamW8bit())
    params = [{"a": mx.zeros(scale.shape)} for _ in methods]
    states = [method.init(each) for method, each in zip(methods, params, strict=True)]
    found = []
    for step in range(1, max(steps) + 1):
        size = 1 + 0.5 * np.sin(step / 40)
        grads = {"a": mx.array(((steady + scale * draw.normal(size=scale.shape)) * size).astype(np.float32))}
        for n, method in enumerate(methods):
            params[n], states[n] = method.update(params[n], grads, states[n], 1e-3)
        mx.eval(params, states)
        if step in steps:
            full, packed = (np.array(each["a"]) for each in params)
            found.append(float(np.linalg.norm(packed - full) / np.linalg.norm(full)))
    return found, float(np.abs(packed - full).max() / 1e-3)


@pytest.mark.parametrize("spread", BOUNDS)
def test_eight_bit_moments_drift_as_little_as_the_recipe_page_says(spread):
    found, _ = drift(spread, STEPS)
    head, *lines = re.findall(r"^\| (?:scale of the values|equal|varies by a factor of e).*$", PAGE, re.MULTILINE)
    line = dict(zip(BOUNDS, lines, strict=True))[spread]
    assert [int(n) for n in re.findall(r"after (\d+) steps", head)] == list(STEPS)
    measured, bounds = ([float(n) / 100 for n in re.findall(r"([\d.]+) %", line)][k::2] for k in (0, 1))
    assert bounds == pytest.approx(BOUNDS[spread])
    for drifted, said, bound in zip(found, measured, bounds, strict=True):
        assert 0 < drifted < bound
        assert drifted == pytest.approx(said, rel=0.06)


def test_no_value_runs_away_where_a_block_spans_many_decades():
    _, worst = drift(2.5, (100,))
    assert worst < 200  # lr, in 100 steps; with the paper's table, thousands


def test_the_largest_value_of_a_block_and_zeros_are_stored_exactly_and_no_small_second_moment_as_zero():
    x = np.zeros((3, BLOCK), np.float32)
    x[0, 7], x[1, 9] = -1.2345678, 3e-20
    assert np.array_equal(np.array(dequantize(*quantize(mx.array(x), True))), x)
    assert np.array_equal(np.array(dequantize(*quantize(mx.array(np.abs(x)), False))), np.abs(x))
    back = np.array(dequantize(*quantize(mx.array([[1.0, 1e-30] + [0.0] * (BLOCK - 2)]), False)))[0]
    assert back[1] > 0 and not back[2:].any()


def test_arrays_smaller_than_a_block_keep_float32_moments_and_odd_sizes_are_padded():
    params = {"small": mx.zeros((3, 5)), "odd": mx.zeros((7, 50))}
    packed, full = AdamW8bit(weight_decay=0.1), AdamW(weight_decay=0.1)
    ours, theirs, state, reference = params, params, packed.init(params), full.init(params)
    assert (state["small.m"].dtype, state["odd.m"].shape, state["odd.v"].dtype) == (mx.float32, (2, BLOCK), mx.uint8)
    draw = np.random.default_rng(3)
    for _ in range(10):
        grads = {name: mx.array(draw.normal(size=value.shape).astype(np.float32)) for name, value in params.items()}
        ours, state = packed.update(ours, grads, state, 1e-2)
        theirs, reference = full.update(theirs, grads, reference, 1e-2)
    assert mx.array_equal(ours["small"], theirs["small"])
    assert 0 < mx.max(mx.abs(ours["odd"] - theirs["odd"])).item() < 0.01
    assert ours["odd"].shape == (7, 50)
