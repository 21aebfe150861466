"""A run that is stopped, killed, made longer or shorter ends as an unbroken one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stages.text_to_image.train.config import ValidationConfig
from stages.tuner.config import EmaConfig
from tests.stages.text_to_image.train.runs import BASE, Run


@pytest.fixture(scope="module")
def whole(transformer: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("whole"), transformer, replace(BASE, accumulate=2)).go()


def test_rows_that_a_kill_lost_are_yielded_again_without_training(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, whole.config).go()
    run.loaded = 0
    for key in [key for key in run.stored if key[0] >= 5]:
        del run.stored[key]
    run.go()
    assert run.loaded == 0
    assert run.rows == whole.rows


def test_rows_that_neither_table_nor_checkpoint_holds_are_trained_again(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, whole.config).go()
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


@pytest.mark.parametrize("name", ["adapter.safetensors", "adapter_ema.safetensors", "adapter_best.safetensors"])
@pytest.mark.parametrize("left", [0, 100])
def test_a_result_that_was_deleted_or_cut_comes_back_from_its_checkpoint(transformer, tmp_path, name, left):
    config = replace(BASE, steps=3, ema=EmaConfig(), validation=ValidationConfig(every=2))
    run = Run(tmp_path, transformer, config).go()
    path = tmp_path / "artifacts" / name
    before = path.read_bytes()
    path.write_bytes(before[:-left]) if left else path.unlink()
    run.loaded = 0
    run.go()
    assert path.read_bytes() == before
    assert run.loaded == 0


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


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
