"""What a training run says of itself, and where it looks wrong."""

from __future__ import annotations

import re
from dataclasses import replace

from stages.text_to_image.train.selection import MaskConfig, ValidationConfig
from tests.stages.text_to_image.train.runs import BASE, Run, rich_tables

# What is said


def test_a_run_prints_its_control_files_the_size_of_its_adapter_and_what_is_held_out(transformer, tmp_path):
    config = replace(BASE, steps=1, rank_for={"attn.*": 4}, validation=ValidationConfig())
    said = "\n".join(Run(tmp_path, transformer, config).go().said)
    assert f"files named stop, checkpoint or pause in {tmp_path / 'artifacts'} control this run" in said
    assert "lora of rank 2 to 4 on " in said and "batches per epoch; 1 images are held out" in said


def test_a_run_with_masks_prints_how_many_crops_have_one(transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(BASE, steps=1, mask=MaskConfig()), rich_tables()).go()
    assert any(re.search(r"batches per epoch; [1-9]\d* crops have a mask$", line) for line in run.said)
