"""A run that is stopped, killed, made longer or shorter ends as an unbroken one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.text_to_image.train import task
from stages.text_to_image.train.config import ValidationConfig
from stages.text_to_image.train.stage import STAGE
from stages.tuner import checkpoint
from stages.tuner.config import EmaConfig
from stages.tuner.loop import row_key
from stages.tuner.step import TrainingStep
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
    assert before[2] == (tmp_path / "artifacts" / "checkpoints" / "step-000002" / checkpoint.ADAPTER).read_bytes(), "the best"
    run.loaded = 0
    for damage in (Path.unlink, lambda path: cut(path, 100)):
        for path in files:  # each alone must be missed
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


# Stopped where no step is being taken: while the model loads, and within a measurement


BATCHES = 3  # of a measurement: two crops at three levels, two samples at once
CONFIG = replace(BASE, steps=4, validation=ValidationConfig(paths=("image0", "image2"), every=2, sigmas=(0.2, 0.5, 0.8)))


@pytest.fixture(scope="module")
def measured(transformer: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("measured"), transformer, CONFIG).go()


def results(run: Run) -> list[Any]:
    names = (checkpoint.ADAPTER, checkpoint.BEST, f"checkpoints/step-{run.config.steps:06d}/{checkpoint.OPTIMIZER}")
    return [run.rows, *((run.folder / "artifacts" / name).read_bytes() for name in names)]


def until(run: Run, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, call: int, how: str) -> list[str]:
    """Run on; within that call of a function, the first being 1, a stop is asked for. Why the stage says that it ended."""
    calls, asked, reasons = iter(range(1, 1000)), [], []
    real = getattr(place, name)

    def stops(*given: Any, **named: Any) -> Any:
        if next(calls) == call:
            asked.append(True)
            if how == "file":
                (run.folder / "artifacts" / "stop").touch()
        return real(*given, **named)

    context = run.context(lambda: bool(asked) and how == "interrupt")
    context.report.pause = reasons.append
    with monkeypatch.context() as patch:
        patch.setattr(place, name, stops)
        for batch in STAGE.run(context):
            run.stored |= {row_key(row): row for row in batch.to_pylist()}
    assert asked, "the run ended before"
    return reasons


@pytest.mark.parametrize(("how", "before"), [("interrupt", None), ("file", 3)], ids=["first", "resumed"])
def test_a_stop_while_the_model_loads_ends_a_run_and_a_resumed_one_before_its_first_step(
    how, before, measured, transformer, tmp_path, monkeypatch
):
    run = Run(tmp_path, transformer, CONFIG)
    if before:
        run.go(stop_at=before)
    stored, saved = dict(run.stored), checkpoint.find_checkpoints(tmp_path / "artifacts")
    reasons = until(run, monkeypatch, task, "load_transformer", 1, how)
    assert reasons == (["stopped by the file `stop`"] if how == "file" else [])
    assert run.stored == stored and checkpoint.find_checkpoints(tmp_path / "artifacts") == saved
    assert not (tmp_path / "artifacts" / "stop").exists()
    assert results(run.go()) == results(measured)


@pytest.mark.parametrize(("step", "batch", "how"), [(0, 1, "interrupt"), (2, BATCHES - 1, "file"), (4, 1, "interrupt")])
def test_an_interrupted_measurement_leaves_no_row_and_is_repeated(step, batch, how, measured, transformer, tmp_path, monkeypatch):
    run = Run(tmp_path, transformer, CONFIG)
    reasons = until(run, monkeypatch, TrainingStep, "measure", step // 2 * BATCHES + batch, how)
    assert reasons == (["stopped by the file `stop`"] if how == "file" else [])
    assert max((row["step"] for row in run.rows if row["split"] == "train"), default=0) == step
    assert not any(row["step"] == step for row in run.rows if row["split"] == "validation")
    assert [saved.step for saved in checkpoint.find_checkpoints(tmp_path / "artifacts")][:1] == ([step] if step else [])
    assert checkpoint.published_step(tmp_path / "artifacts") is None, "what is best is not known yet"
    trained: list[float] = []
    real = TrainingStep.step
    monkeypatch.setattr(TrainingStep, "step", lambda self, *given: [trained.append(given[1]), real(self, *given)][1])
    assert results(run.go()) == results(measured)
    assert len(trained) == CONFIG.steps - step, "no step is taken twice"


def test_a_measurement_is_not_interrupted_after_its_last_micro_batch(measured, transformer, tmp_path, monkeypatch):
    run = Run(tmp_path, transformer, CONFIG)
    until(run, monkeypatch, TrainingStep, "measure", 2 * BATCHES, "interrupt")
    assert len([row for row in run.rows if (row["step"], row["split"]) == (2, "validation")]) == 6
    assert results(run.go()) == results(measured)


def test_a_repeated_measurement_of_which_a_kill_lost_rows_is_repeated_once_more(measured, transformer, tmp_path, monkeypatch):
    run = Run(tmp_path, transformer, CONFIG)
    until(run, monkeypatch, TrainingStep, "measure", BATCHES + 1, "file")
    run.go(kill_at=2, lose=4)
    assert len([row for row in run.rows if (row["step"], row["split"]) == (2, "validation")]) == 2
    assert results(run.go()) == results(measured)
    assert len([line for line in run.said if line.endswith("steps 3 to 4")]) == 2, "no step is taken twice"


def test_patience_that_runs_out_at_an_interrupted_measurement_ends_the_run_there(transformer, tmp_path, monkeypatch):
    stuck = replace(CONFIG.validation, every=1, patience=2, min_delta=100.0)
    straight = Run(tmp_path / "straight", transformer, replace(CONFIG, validation=stuck)).go()
    run = Run(tmp_path / "broken", transformer, straight.config)
    until(run, monkeypatch, TrainingStep, "measure", 2 * BATCHES + 2, "file")
    assert checkpoint.published_step(run.folder / "artifacts") is None
    run.go()
    assert checkpoint.published_step(run.folder / "artifacts") == 2
    assert (run.rows, run.adapter) == (straight.rows, straight.adapter)
    run.loaded = 0
    run.go()
    assert run.loaded == 0
