"""Steering a run from outside."""

from __future__ import annotations

from dataclasses import replace

from stages.text_to_image.train import control
from stages.text_to_image.train.control import Control
from stages.text_to_image.train.stage import STAGE
from stages.tuner import checkpoint
from tests.stages.text_to_image.train.runs import BASE, Run


def steered(run: Run, files: dict[int, str]) -> list[str]:
    """Run on, a file appearing after each of these steps; why the stage ended early, if it did."""
    context = run.context()
    reasons: list[str] = []
    context.pause = reasons.append
    for batch in STAGE.run(context):
        for row in batch.to_pylist():
            run.stored[row["step"], row["split"], row["sample"]] = row
        if name := files.pop(row["step"], ""):
            (run.folder / "artifacts" / name).touch()
    return reasons


def steps(run: Run) -> list[int]:
    return sorted(saved.step for saved in checkpoint.found(run.folder / "artifacts"))


def test_the_file_stop_ends_the_run_after_the_step_with_a_checkpoint_and_is_gone(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer)
    assert steered(run, {1: "stop"}) == ["stopped by the file `stop`"]
    assert (steps(run), max(step for step, _, _ in run.stored)) == ([2], 2)
    assert not (tmp_path / "artifacts" / "stop").exists()
    run.go()
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


def test_a_file_stop_left_over_from_before_does_not_end_the_next_run(transformer, tmp_path):
    run = Run(tmp_path, transformer)
    run.context()
    (tmp_path / "artifacts" / "stop").touch()
    assert steered(run, {}) == []
    assert steps(run) == [3, 6, 7]


def test_the_file_checkpoint_keeps_one_and_changes_nothing_else(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer)
    assert steered(run, {1: "checkpoint"}) == []
    assert steps(run) == [2, 3, 6, 7]
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


def test_the_file_checkpoint_at_a_step_that_keeps_one_anyway_costs_no_other(transformer, tmp_path):
    run = Run(tmp_path, transformer)
    assert steered(run, {2: "checkpoint"}) == []
    assert steps(run) == [3, 6, 7]


def test_a_pause_lasts_until_the_file_is_gone_and_has_a_checkpoint_before_it(whole, transformer, tmp_path, monkeypatch):
    run = Run(tmp_path, transformer)
    waits: list[list[int]] = []

    def sleep(seconds: float) -> None:
        waits.append(steps(run))
        if len(waits) == 3:
            (tmp_path / "artifacts" / "pause").unlink()

    monkeypatch.setattr(control.time, "sleep", sleep)
    assert steered(run, {1: "pause"}) == []
    assert waits == [[2]] * 3
    assert [line for line in run.said if line.startswith("paused; remove ")]
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


def test_a_pause_ends_with_the_file_stop_too(transformer, tmp_path, monkeypatch):
    run = Run(tmp_path, transformer)
    monkeypatch.setattr(control.time, "sleep", lambda seconds: (tmp_path / "artifacts" / "stop").touch())
    assert steered(run, {1: "pause"}) == ["stopped by the file `stop`"]
    assert steps(run) == [2]


def test_training_in_segments_of_steps_ends_as_in_one_go(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(BASE, stop_after_steps=2))
    for segment in (2, 4, 6):
        assert steered(run, {}) == ["stopped after 2 steps, as [train] stop_after_steps says"]
        assert max(step for step, _, _ in run.stored) == segment
    assert steered(run, {}) == []
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


def test_a_segment_of_minutes_ends_after_the_step_in_which_they_are_over(transformer, tmp_path):
    context = Run(tmp_path, transformer, replace(BASE, stop_after_minutes=5.0)).context()
    reasons: list[str] = []
    context.pause = reasons.append
    made = Control(context)
    made.step()
    assert not made.ending
    made.began -= 301
    made.step()
    assert made.ending
    assert reasons == ["stopped after 5.0 minutes, as [train] stop_after_minutes says"]
