"""What a training run says of itself, and where it looks wrong."""

from __future__ import annotations

import re
from dataclasses import replace

from stages.text_to_image.families import family
from stages.text_to_image.train.config import LossConfig, MaskConfig, ValidationConfig
from stages.text_to_image.train.sound_start import expected_loss
from tests.stages.text_to_image.train.runs import BASE, Run, rich_tables, tables

# What is said


def test_a_run_prints_its_control_files_the_size_of_its_adapter_what_is_held_out_and_how_many_crops_have_a_mask(
    transformer, tmp_path
):
    config = replace(BASE, steps=1, rank_for={"attn.*": 4}, validation=ValidationConfig(), mask=MaskConfig())
    said = "\n".join(Run(tmp_path, transformer, config, rich_tables()).go().said)
    assert f"files named stop, checkpoint or pause in {tmp_path / 'artifacts'} control this run" in said
    assert "lora of rank 2 to 4 on " in said and "mean batch 2, 3 batches per epoch; " in said
    assert said.count("; held out: 1 image") == 1 and re.search(r"with a mask: [1-9]\d* crops?(;|$)", said, re.MULTILINE)


def test_a_run_prints_its_mean_batch_and_which_crops_repeat_or_share_batches(transformer, tmp_path):
    cases = {
        "4 crops of 4 images in 1 shape, mean batch 4, 1 batches per epoch": ((64, 64),) * 4,
        "4 crops of 4 images in 2 shapes, mean batch 4, 1 batches per epoch; "
        "batches mix 2 sizes, because there are fewer pictures of each than a batch has": ((64, 64),) * 3 + ((96, 64),),
        "3 crops of 3 images in 1 shape, mean batch 4, 0.75 batches per epoch; "
        "crops repeat within a batch, because there are fewer than a batch has": ((64, 64),) * 3,
    }
    for number, (line, shapes) in enumerate(cases.items()):
        run = Run(tmp_path / str(number), transformer, replace(BASE, steps=1, batch_size=4), tables(shapes)).go()
        assert any(said.endswith(line) for said in run.said), run.said
        assert len(run.rows) == 4


def test_a_loss_that_is_wrong_from_the_start_is_explained_with_the_familys_name_and_no_defect_of_a_model_of_the_checkout():
    expected = expected_loss(LossConfig(), family("klein-base-4b"))
    assert expected and "klein-base-4b does not know pictures like these, or a part of the model is wrong: " in expected.remedy
    expected = expected_loss(LossConfig(), family("micro"))
    assert expected and expected.remedy == "micro has never seen pictures like these; it learns them from here on"
