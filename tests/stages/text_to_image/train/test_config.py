"""Errors in the section [train]."""

from __future__ import annotations

import pytest

from stages.text_to_image.train.config import TrainConfig
from stages.tuner.config import OptimizerConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base_bits_for": {"*": 5}}, r"base_bits_for must give 16, 8 or 4 bits, got 5 for '\*'"),
        ({"optimizer": OptimizerConfig(kind="prodigy")}, "lr must be >= 0.01 with prodigy"),
        ({"rslora": True, "variant": "lokr"}, "rslora has no effect with variant"),
    ],
)
def test_an_error_about_contradictory_settings_names_them(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**values)


def test_an_error_about_a_number_that_an_optimizer_lacks_names_it():
    with pytest.raises(ValueError, match="eps is not a setting of lion"):
        OptimizerConfig(kind="lion", eps=1e-6)
