"""A run that is stopped, killed, made longer or shorter ends as an unbroken one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stages.text_to_image.train.config import ValidationConfig
from stages.tuner.config import EmaConfig
from tests.stages.text_to_image.train.runs import BASE, Run


def test_rows_that_a_kill_lost_are_yielded_without_training_unless_no_checkpoint_holds_them_either(whole, transformer, tmp_path):
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True)
    run = Run(tmp_path, transformer, stored={key: row for key, row in whole.stored.items() if key[0] < 5}).go()
    assert run.loaded == 0
    assert run.rows == whole.rows
    (tmp_path / "artifacts" / "checkpoints" / "step-000003" / "rows.arrow").unlink()
    for key in [key for key in run.stored if key[0] == 2]:
        del run.stored[key]
    run.go()
    assert run.said[-2].endswith("steps 1 to 7")
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


@pytest.mark.parametrize(("steps", "loaded"), [(5, 1), (3, 0)])  # without and with a checkpoint
def test_a_run_made_shorter_has_the_adapter_of_the_shorter_run_and_made_longer_its_own(
    steps, loaded, whole, transformer, tmp_path
):
    run = Run(tmp_path / "a", transformer, replace(whole.config, keep_states=1)).go()
    for config, loads in ((replace(run.config, steps=steps), loaded), (run.config, 0)):
        run.config, run.loaded = config, 0
        run.go()
        expected = whole if config.steps == whole.config.steps else Run(tmp_path / "b", transformer, config).go()
        assert (run.loaded, run.adapter) == (loads, expected.adapter)


def test_a_result_that_was_deleted_or_cut_comes_back_from_its_checkpoint(transformer, tmp_path):
    config = replace(BASE, steps=3, ema=EmaConfig(), validation=ValidationConfig(every=2))
    run = Run(tmp_path, transformer, config).go()
    files = [tmp_path / "artifacts" / f"{name}.safetensors" for name in ("adapter", "adapter_ema", "adapter_best")]
    before = [path.read_bytes() for path in files]
    run.loaded = 0
    for damage in (Path.unlink, lambda path: cut(path, 100)):
        for path in files:
            damage(path)
        run.go()
        assert [path.read_bytes() for path in files] == before
    assert run.loaded == 0


def cut(path: Path, size: int = 4) -> None:
    path.write_bytes(path.read_bytes()[:-size])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda newest: cut(newest / "adapter.safetensors"), "the checkpoint of step 5 is damaged; the run goes on from step 3"),
        (  # as `keep_states` does
            lambda newest: (newest / "optimizer.safetensors").unlink(),
            "the checkpoint of step 5 has no state any more to go on from (train.keep_states); the run goes on from step 3",
        ),
        (lambda newest: shutil.rmtree(newest.parent), "no checkpoint up to step"),
    ],
)
def test_a_checkpoint_from_which_the_run_cannot_go_on_is_told_of_and_changes_no_result(
    damage, told, whole, transformer, tmp_path
):
    run = Run(tmp_path, transformer, whole.config).go(stop_at=5)
    damage(max((tmp_path / "artifacts/checkpoints").iterdir()))
    run.go()
    assert any(line.startswith(told) for line in run.said)
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)
