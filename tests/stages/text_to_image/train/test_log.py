"""What a training run says of itself, and where it looks wrong."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from stages.text_to_image.train.selection import MaskConfig, ValidationConfig
from stages.tuner.config import ScheduleConfig
from stages.tuner.log import schedule_warnings
from tests.stages.text_to_image.train.runs import BASE, Run
from tests.stages.text_to_image.train.test_train_features import rich

# What is said


def test_a_run_says_where_it_is_controlled_how_large_its_adapter_is_and_what_is_held_out(transformer, tmp_path):
    config = replace(BASE, steps=1, rank_for={"attn.*": 4}, validation=ValidationConfig())
    said = "\n".join(Run(tmp_path, transformer, config).go().said)
    assert f"files named stop, checkpoint or pause in {tmp_path / 'artifacts'} control this run" in said
    assert "lora of rank 2 to 4 on " in said and "batches per epoch; 1 images are held out" in said


def test_a_run_with_masks_says_how_many_crops_have_one(transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(BASE, steps=1, mask=MaskConfig()), rich()).go()
    assert any(re.search(r"batches per epoch; [1-9]\d* crops have a mask$", line) for line in run.said)


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
def test_a_schedule_that_does_not_go_with_the_number_of_steps_is_said(schedule, said):
    lines = list(schedule_warnings(replace(BASE, steps=10, schedule=schedule)))
    assert len(lines) == bool(said) and all(line.startswith(said) for line in lines)


# Health


def test_no_rate_is_blamed_for_a_step_that_the_schedule_has_at_zero(transformer, tmp_path):
    schedule = ScheduleConfig("linear", warmup_steps=1, decay_steps=5)
    run = Run(tmp_path, transformer, replace(BASE, steps=10, batch_size=1, schedule=schedule)).go()
    assert not any("raise [train] lr" in line for line in run.said)


def test_an_update_that_makes_the_adapter_anew_is_said(transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(BASE, steps=10, lr=5.0, schedule=ScheduleConfig(warmup_steps=0), batch_size=1)).go()
    assert any(line.startswith("step 1: the update is") and line.endswith("lower [train] lr (5)") for line in run.said)


def test_an_update_lost_in_rounding_is_said(transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(BASE, steps=10, lr=1e-10, batch_size=1)).go()
    assert any("raise [train] lr" in line for line in run.said)
