from __future__ import annotations

from typing import get_args

import pytest

from stages.tuner.config import Schedule, Shape


@pytest.mark.parametrize("shape", get_args(Shape))
def test_the_warm_up_rises_evenly_and_its_last_step_has_the_full_rate(shape):
    rates = [Schedule(1e-4, shape, warmup=4, decay=10).at(step) for step in range(1, 5)]
    assert rates == pytest.approx([0.25e-4, 0.5e-4, 0.75e-4, 1e-4])
    assert Schedule(1e-4).at(1) == 1e-4


# Of the way from the rate to its floor, at steps 10, 15, 20, 25 and 1000.
@pytest.mark.parametrize(
    ("shape", "fallen"),
    [("constant", [0] * 5), ("linear", [0.25, 0.5, 0.75, 1, 1]), ("cosine", [0.1464466, 0.5, 0.8535534, 1, 1])],
)
def test_the_rate_falls_to_its_floor_by_the_shape_and_stays_there(shape, fallen):
    schedule = Schedule(2.0, shape, warmup=5, decay=20, floor=0.1)
    rates = [schedule.at(step) for step in (10, 15, 20, 25, 1000)]
    assert rates == pytest.approx([2 - 1.8 * share for share in fallen])
