"""The lines that a run prints before its first step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stages.tuner.config import ScheduleConfig
from stages.tuner.log import schedule_warnings
from tests.stages.tuner.toy import CONFIG


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (ScheduleConfig(warmup_steps=20), "all 10 steps are warm-up"),
        (ScheduleConfig("cosine", warmup_steps=2, decay_steps=4), "from step 6 on the rate is 0 and nothing is trained"),
        (ScheduleConfig("linear", warmup_steps=2, decay_steps=40), "the rate reaches its floor at step 42"),
        (ScheduleConfig("linear", warmup_steps=2, decay_steps=8), ""),
        (ScheduleConfig("linear", warmup_steps=2, decay_steps=4, floor=0.1), ""),
        (ScheduleConfig(warmup_steps=2), ""),
    ],
)
def test_a_schedule_that_does_not_suit_the_number_of_steps_is_reported(schedule, said):
    lines = list(schedule_warnings(replace(CONFIG, steps=10, schedule=schedule)))
    assert len(lines) == bool(said) and all(line.startswith(said) for line in lines)
