"""Errors in the section [train]."""

from __future__ import annotations

import pytest

from stages.text_to_image.train.config import TrainConfig
from stages.tuner.config import OptimizerConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps must be >= 1 and <= 1000000, got 0"),
        ({"caption_dropout": 1.5}, "caption_dropout must be >= 0 and <= 1, got 1.5"),
        ({"alpha": 0.0}, "alpha must be >= 1e-12 and <= 1000000, got 0.0"),
        ({"lr": -1e-4}, "lr must be >= 1e-12 and <= 100, got -0.0001"),
    ],
)
def test_an_error_about_a_setting_out_of_range_names_it(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base_bits_for": {"*": 5}}, r"base_bits_for must give 16, 8 or 4 bits, got 5 for '\*'"),
        ({"optimizer": OptimizerConfig(kind="prodigy")}, "lr must be >= 0.01 with prodigy"),
        ({"rslora": True, "variant": "lokr"}, "rslora has no effect with variant"),
        ({"memory": 0}, "memory must be >= 1 and <= 10000, got 0"),
        ({"stop_after_minutes": 0.0}, "stop_after_minutes must be >= 1e-12 and <= 1000000, got 0.0"),
    ],
)
def test_an_error_about_contradictory_settings_names_them(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**values)


def test_an_error_about_a_number_that_an_optimizer_lacks_names_it():
    with pytest.raises(ValueError, match="eps is not a setting of lion"):
        OptimizerConfig(kind="lion", eps=1e-6)
