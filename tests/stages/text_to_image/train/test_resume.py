"""A run that is stopped, killed, made longer or shorter ends as an unbroken one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stages.text_to_image.train.config import ValidationConfig
from stages.text_to_image.train.stage import STAGE
from stages.tuner import checkpoint
from stages.tuner.config import EmaConfig
from tests import harness
from tests.stages.text_to_image.train.runs import (
    BASE,
    Run,
)


@pytest.fixture(scope="module")
def whole(transformer: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("whole"), transformer, replace(BASE, accumulate=2)).go()


def test_a_stop_writes_a_checkpoint_of_its_step_and_the_next_run_goes_on_from_it(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, whole.config).go(stop_at=2)
    assert max(step for step, _, _ in run.stored) == 2
    assert [saved.step for saved in checkpoint.find_checkpoints(tmp_path / "artifacts")] == [2]
    first = run.go(kill_at=3).said[-2]
    assert first.endswith("steps 3 to 7")


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


def test_a_finished_run_loads_nothing_and_writes_nothing(whole):
    before = {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*")}
    whole.loaded = 0
    assert harness.run(STAGE, whole.context()).num_rows == 0
    assert whole.loaded == 0
    assert before == {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*")}


def test_a_run_made_shorter_has_the_adapter_of_the_shorter_run(whole, transformer, tmp_path):
    run = Run(tmp_path / "a", transformer, whole.config).go()
    run.config = replace(whole.config, steps=6)
    run.go()
    assert run.adapter == Run(tmp_path / "b", transformer, run.config).go().adapter
    run.config = whole.config
    run.loaded = 0
    run.go()
    assert run.loaded == 0
    assert run.adapter == whole.adapter


def test_a_run_made_as_short_as_one_of_its_checkpoints_takes_its_adapter_and_loads_nothing(whole, transformer, tmp_path):
    run = Run(tmp_path / "a", transformer, replace(whole.config, keep_states=1)).go()
    run.config, run.loaded = replace(run.config, steps=3), 0
    run.go()
    assert run.loaded == 0
    assert run.adapter == Run(tmp_path / "b", transformer, run.config).go().adapter


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


def test_a_damaged_checkpoint_is_reported_and_the_run_goes_on_from_the_one_before_it(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, whole.config).go(stop_at=5)
    newest = max((tmp_path / "artifacts/checkpoints").iterdir()) / "adapter.safetensors"
    newest.write_bytes(newest.read_bytes()[:-4])
    run.go()
    assert "the checkpoint of step 5 is damaged; the run goes on from step 3" in run.said
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


def test_a_checkpoint_whose_training_state_was_not_kept_is_not_called_damaged(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, whole.config).go(stop_at=5)
    (max((tmp_path / "artifacts/checkpoints").iterdir()) / "optimizer.safetensors").unlink()  # as `keep_states` does
    run.go()
    told = "the checkpoint of step 5 has no state any more to go on from (train.keep_states); the run goes on from step 3"
    assert told in run.said
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


def test_a_run_whose_checkpoints_are_gone_says_that_it_begins_again(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, whole.config).go(stop_at=5)
    shutil.rmtree(tmp_path / "artifacts" / "checkpoints")
    run.go()
    assert any(line.startswith("no checkpoint up to step") for line in run.said)
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


def test_the_interval_of_checkpoints_changes_no_result(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(whole.config, checkpoint_every=1, keep_states=1)).go()
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)
    states = sorted(path.parent.name for path in tmp_path.rglob("optimizer.safetensors"))
    assert states == ["step-000007"]
    assert len(list(tmp_path.rglob("checkpoints/*/adapter.safetensors"))) == 7
