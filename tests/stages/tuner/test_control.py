"""Control of a running training: files, interrupts, and limits on steps and minutes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stages.text_to_image.samples.stage import chosen_checkpoints
from stages.tuner import checkpoint
from stages.tuner.control import Control
from tests.stages.tuner.toy import A_MINUTE_A_READING, CONFIG, ToyRun, ToyTask

UNMEASURED = replace(CONFIG, validation=None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return ToyRun(tmp_path_factory.mktemp("whole") / "artifacts", UNMEASURED).go()


def controlled(run: ToyRun, step: int, name: str) -> Callable[[int], None]:
    """A function for `ToyRun.go` that makes a control file appear after a step."""
    return lambda done: (run.folder / name).touch() if done == step else None


def steps(run: ToyRun) -> list[int]:
    return sorted(saved.step for saved in checkpoint.find_checkpoints(run.folder))


def test_the_file_stop_ends_the_run_after_the_step_with_a_checkpoint_and_is_removed(whole, tmp_path):
    run = ToyRun(tmp_path, UNMEASURED)
    run.go(after=controlled(run, 1, "stop"))
    assert run.reasons == ["stopped by the file `stop`"]
    assert (steps(run), max(step for step, _, _ in run.stored)) == ([2], 2)
    assert not (tmp_path / "stop").exists()
    assert [saved.step for saved in chosen_checkpoints("all", run.folder, 9)] == [2]
    run.go()
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)
    # Previews of all checkpoints do not depend on when the run was stopped.
    assert steps(run) == [2, 3, 6, 7] and [saved.step for saved in chosen_checkpoints("all", run.folder, 9)] == [3, 6, 7]


def test_a_file_stop_left_over_from_before_does_not_end_the_next_run(tmp_path):
    (tmp_path / "stop").touch()
    run = ToyRun(tmp_path, UNMEASURED).go()
    assert run.reasons == []
    assert steps(run) == [3, 6, 7]


@pytest.mark.parametrize(("after", "saved"), [(1, [2, 3, 6, 7]), (2, [3, 6, 7])])
def test_the_file_checkpoint_adds_one_where_there_is_none_and_changes_nothing_else(after, saved, whole, tmp_path):
    run = ToyRun(tmp_path, UNMEASURED)
    run.go(after=controlled(run, after, "checkpoint"))
    assert (run.reasons, steps(run)) == ([], saved)
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


def test_a_pause_lasts_until_the_file_is_gone_and_has_a_checkpoint_before_it(whole, tmp_path):
    run = ToyRun(tmp_path, UNMEASURED)
    waits: list[list[int]] = []

    def sleep(seconds: float) -> None:
        waits.append(steps(run))
        if len(waits) == 3:
            (tmp_path / "pause").unlink()

    run.go(after=controlled(run, 1, "pause"), sleep=sleep)
    assert (run.reasons, waits) == ([], [[2]] * 3)
    assert [line for line in run.said if line.startswith("paused; remove ")]
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


def test_a_pause_ends_with_the_file_stop_too(tmp_path):
    run = ToyRun(tmp_path, UNMEASURED)
    run.go(after=controlled(run, 1, "pause"), sleep=lambda seconds: (tmp_path / "stop").touch())
    assert (run.reasons, steps(run)) == (["stopped by the file `stop`"], [2])


def test_a_segment_of_minutes_ends_after_the_step_in_which_they_are_over(tmp_path: Path):
    config = replace(UNMEASURED, stop_after_minutes=5.0)
    run, seconds = ToyRun(tmp_path, config), [100.0]
    control = Control(run.context(ToyTask(config)), config, clock=lambda: seconds[0])
    control.after_step()
    assert not control.ending
    seconds[0] += 301
    control.after_step()
    assert control.ending
    assert run.reasons == ["stopped after 5.0 minutes, as [train] stop_after_minutes says"]


def test_a_checkpoint_is_written_when_the_last_one_is_old_and_only_the_newest_of_that_kind_is_kept(whole, tmp_path):
    config = replace(UNMEASURED, checkpoint_every=1000, checkpoint_minutes=2.0)
    run = ToyRun(tmp_path, config)
    run.go(clock=A_MINUTE_A_READING)
    last = run.config.steps
    timed = [saved.step for saved in checkpoint.find_checkpoints(run.folder) if saved.state.get("timed")]
    assert steps(run)[-1] == last and len(timed) == 1 and timed[0] < last
    assert run.rows == whole.rows


def test_a_kill_that_loses_rows_of_a_deleted_timed_checkpoint_loses_no_step(whole, tmp_path):
    run = ToyRun(tmp_path, replace(UNMEASURED, checkpoint_every=1000, checkpoint_minutes=1e-9))
    run.go(kill_at=6, lose=3 * 8, clock=A_MINUTE_A_READING)
    assert steps(run) == [6] and max(row["step"] for row in run.rows) == 3
    run.go()
    assert "; steps 7 to 7: " in run.said[-2]
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)
