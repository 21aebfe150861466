"""Runs that do not fit into memory: refused in one line, with the settings that would fit."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from typing import Any

import pytest

from stages.text_to_image.train import task
from stages.text_to_image.train.config import TrainConfig, ValidationConfig
from stages.tuner.config import OptimizerConfig
from tests.stages.text_to_image.train.plans import chosen, needs
from tests.stages.text_to_image.train.runs import BASE, Run, tables


def refused(run: Run) -> tuple[dict[str, Any], float]:
    """The settings that a refusal names, and what it says that they need, GB: as they stand in its line."""
    with pytest.raises(ValueError) as caught:
        chosen(run)
    line = str(caught.value)
    assert "\n" not in line and "too much" not in line
    found = re.fullmatch(r"train: plan .* may take: (.*) would need (.*) GB", line)
    assert found
    parts = [re.fullmatch(r"(\[.*?\]) (.*)", part) for part in found[1].split("; ")]
    return tomllib.loads("\n".join(f"{part[1]}\n" + part[2].replace(", ", "\n") for part in parts if part)), float(found[2])


ALL = {"memory": "blocks", "micro_batch": 1, "base_bits": 4, "optimizer": {"kind": "adamw8bit"}}


def with_settings(config: TrainConfig, section: dict[str, Any]) -> TrainConfig:
    method = {"optimizer": OptimizerConfig(**section["optimizer"])} if "optimizer" in section else {}
    return replace(config, **section | method)


def test_what_cannot_fit_is_refused_before_a_weight_is_loaded_with_the_setting_that_would(wide, tmp_path, monkeypatch):
    run = Run(tmp_path, wide, replace(BASE, memory_gb=needs(Run(tmp_path, wide), "blocks") * 0.95))
    monkeypatch.setattr(task, "load_transformer", lambda *given, **named: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match=r"^train: plan blocks needs about .* at 96 x 64 px, .* would need .* GB$") as caught:
        run.go()
    assert "micro_batch = 1" in str(caught.value)
    run.config = replace(run.config, batch_size=1, memory_gb=needs(run, "blocks", 1) * 0.95)
    with pytest.raises(ValueError, match=r"\[train\] base_bits = 8 would need"):
        run.go()
    run.config = replace(run.config, memory_gb=1e-6)
    every = r'base_bits = 4, stream_blocks = true; \[train.optimizer\] kind = "adamw8bit"'
    with pytest.raises(ValueError, match=rf"{every} would need .* GB, too much as well; choose a smaller family, or a device"):
        run.go()
    run.config = replace(run.config, base_bits=4, stream_blocks=True, optimizer=OptimizerConfig(kind="lion"))
    with pytest.raises(ValueError, match=r"no setting would need less; choose a smaller family, or a device with more memory$"):
        run.go()
    run.config = replace(run.config, memory="whole", memory_gb=needs(run, "whole", 1) * 0.99)
    with pytest.raises(ValueError, match=r'plan whole needs .* memory = "blocks" would need'):
        run.go()


@pytest.mark.parametrize("names", [("micro_batch", "base_bits"), ("base_bits", "optimizer"), tuple(ALL)], ids=" and ".join)
def test_where_only_several_settings_together_fit_a_refusal_names_them_all_and_they_are_accepted(names, deep, tmp_path):
    config = replace(BASE, rank=16, batch_size=1 if names == ("base_bits", "optimizer") else 4)
    if "memory" in names:
        config = replace(config, memory="whole")
    run = Run(tmp_path, deep, config, tables(((128, 128),) * 8))
    run.config = with_settings(config, {name: ALL[name] for name in names})
    limit = needs(run, "blocks", 1) * 1.0001
    for left_out in names:
        run.config = replace(with_settings(config, {name: ALL[name] for name in names if name != left_out}), memory_gb=limit)
        plan = "whole" if run.config.memory == "whole" else "blocks"
        assert needs(run, plan, run.config.micro_batch or config.batch_size) > limit
    run.config = replace(config, memory_gb=limit)
    settings, said = refused(run)
    assert settings == {"train": {name: ALL[name] for name in names}}
    assert said == pytest.approx(limit, rel=0.01)
    run.config = with_settings(run.config, settings["train"])
    assert chosen(run).plan == "blocks"


@pytest.mark.parametrize("aside", [None, ValidationConfig(paths=("image3",))], ids=["trained", "held out"])
def test_where_no_settings_fit_the_highest_resolution_that_does_is_named_and_it_is_accepted(aside, deep, tmp_path):
    run = Run(tmp_path, deep, replace(BASE, batch_size=1, validation=aside), tables(((64, 64),) * 3 + ((640, 480),)))
    every = {"base_bits": 4, "optimizer": ALL["optimizer"], "stream_blocks": True}
    least = with_settings(run.config, every)

    def at(side: int) -> float:
        return needs(Run(tmp_path, deep, least, tables(((64, 64),) * 3 + ((side, side),))), "blocks", 1)

    run.config = replace(run.config, memory_gb=at(352) * 1.0001)
    assert at(368) > run.config.memory_gb
    settings, said = refused(run)
    assert settings == {"train": every, "buckets": {"resolutions": [352]}}
    assert said == pytest.approx(at(352), rel=0.01)
    run.config = with_settings(run.config, settings["train"])
    run.tables = tables(((64, 64),) * 3 + ((352, 352),))
    assert chosen(run).plan == ("whole" if aside else "blocks"), "a measurement's need is the same in every plan"
    run.config = replace(run.config, memory_gb=at(256) * 0.999)
    run.tables = tables(((64, 64),) * 3 + ((640, 480),))
    with pytest.raises(ValueError, match=r"resolutions = \[256\] would need .* GB, too much as well; choose a smaller family"):
        chosen(run)
