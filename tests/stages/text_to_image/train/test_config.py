"""The section [train]: errors, and what of it is in a recipe."""

from __future__ import annotations

import pytest

from pipeline.project.recipe import recorded, settings_of
from stages.text_to_image.captions.stage import CaptionsConfig
from stages.text_to_image.slider import SliderConfig
from stages.text_to_image.train.config import DataConfig, TLoraConfig, TrainConfig, ValidationConfig
from stages.tuner.config import OptimizerConfig

SLIDER = SliderConfig("{caption}, old", "{caption}, young", ("a man",))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base_bits_for": {"*": 5}}, r"base_bits_for must give 16, 8 or 4 bits, got 5 for '\*'"),
        ({"optimizer": OptimizerConfig(kind="prodigy")}, "lr must be >= 0.01 with prodigy"),
        ({"rslora": True, "variant": "lokr"}, "rslora has no effect with variant"),
        ({"tlora": TLoraConfig(), "variant": "dora"}, 'tlora needs variant = "lora", got "dora"'),
        ({"tlora": TLoraConfig(), "initial": "a.safetensors"}, 'initial must be unset with tlora\'s start = "orthogonal"'),
        ({"tlora": TLoraConfig(min_rank=33)}, "min_rank must be at most the rank, 32, got 33"),
        ({"slider": SLIDER, "validation": ValidationConfig()}, r"validation must be unset with \[train.slider\]"),
        ({"slider": SLIDER, "data": DataConfig(backwards=("*",))}, r"data\] backwards must be unset with \[train.slider\]"),
    ],
)
def test_an_error_about_contradictory_settings_names_them(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**values)


def test_a_feature_that_is_not_set_is_in_no_recipe():
    assert not {"tlora", "rank_dropout", "beneath", "slider"} & recorded(TrainConfig()).keys()
    assert "slider" not in recorded(CaptionsConfig()) and "backwards" not in settings_of(TrainConfig()).get("data", {})


def test_an_error_about_a_number_that_an_optimizer_lacks_names_it():
    with pytest.raises(ValueError, match="eps is not a setting of lion"):
        OptimizerConfig(kind="lion", eps=1e-6)
