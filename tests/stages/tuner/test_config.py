from __future__ import annotations

from typing import get_args

import pytest

from stages.tuner.config import Schedule, Shape


@pytest.mark.parametrize("shape", get_args(Shape))
def test_the_warm_up_rises_evenly_and_its_last_step_has_the_full_rate(shape):
    rates = [Schedule(1e-4, shape, warmup=4, decay=10).at(step) for step in range(1, 5)]
    assert rates == pytest.approx([0.25e-4, 0.5e-4, 0.75e-4, 1e-4])


def test_constant_stays():
    schedule = Schedule(1e-4, "constant", warmup=2)
    assert {schedule.at(step) for step in (2, 3, 100, 10**6)} == {1e-4}


def test_without_a_warm_up_the_first_step_has_the_full_rate():
    assert Schedule(1e-4).at(1) == 1e-4


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_decay_passes_the_middle_and_ends_at_the_floor_for_good(shape, middle):
    schedule = Schedule(2.0, shape, warmup=5, decay=20, floor=0.1)
    assert schedule.at(15) == pytest.approx(2 * middle)
    assert schedule.at(25) == schedule.at(1000) == pytest.approx(0.2)
    rates = [schedule.at(step) for step in range(5, 26)]
    assert rates == sorted(rates, reverse=True)


def test_cosine_is_above_the_line_first_and_below_it_later():
    line, cosine = (Schedule(1.0, shape, decay=100) for shape in ("linear", "cosine"))
    assert cosine.at(25) > line.at(25)
    assert cosine.at(75) < line.at(75)
