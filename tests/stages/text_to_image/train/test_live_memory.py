"""What holds a training run's memory in bounds, in its steps, its measurements and replays: the live limit, the micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from stages.text_to_image.train.config import ValidationConfig
from stages.text_to_image.train.task import ImageTask
from stages.tuner import checkpoint, loop
from stages.tuner import replay as tuner_replay
from stages.tuner import step as tuner_step
from stages.tuner.memory import MemoryPlan, choose_plan
from stages.tuner.replay import replay_step
from stages.tuner.step import TrainingStep
from tests.stages.text_to_image.train.plans import batch_of, chosen, needs, noted
from tests.stages.text_to_image.train.runs import BASE, Run, tables

ASIDE = ValidationConfig(paths=("image0", "image2"), every=2, sigmas=(0.2, 0.5, 0.8))


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits of live bytes that memory plans choose."""
    found: list[int] = []

    def noted(*given: Any, **named: Any) -> MemoryPlan:
        chosen = choose_plan(*given, **named)
        assert chosen.live_bytes
        found.append(chosen.live_bytes)
        return chosen

    monkeypatch.setattr(loop, "choose_plan", noted)
    monkeypatch.setattr(tuner_replay, "choose_plan", noted)
    return found


def limit(*given: Any) -> int:
    return mx.get_memory_limit()


@pytest.mark.parametrize("plan", ["blocks", "whole"])
def test_every_step_and_measurement_runs_under_the_live_memory_limit_of_the_plan_and_the_limit_is_restored(
    plan, bounds, transformer, tmp_path, monkeypatch
):
    before = mx.get_memory_limit()
    steps, measurements = (noted(monkeypatch, limit, name) for name in ("loss_and_grads", "predict"))
    Run(tmp_path, transformer, replace(BASE, steps=2, memory=plan, memory_gb=0.3, validation=ASIDE)).go()
    assert set(steps) == set(measurements) == set(bounds) and len(steps) >= 2 and len(measurements) == 6
    assert mx.get_memory_limit() == before
    assert (0.29e9 if plan == "whole" else 0) < bounds[0] < 0.3e9


def test_a_measurement_computes_as_many_samples_at_once_as_the_settings_say(transformer, tmp_path, monkeypatch):
    """Whatever memory is free: micro-batches are a function of the settings, and each sample's loss the same but for rounding."""
    counts: list[int] = []
    real = TrainingStep.measure

    def measure(self: TrainingStep, batch: Any) -> list[float]:
        counts.append(len(batch.samples))
        return real(self, batch)

    monkeypatch.setattr(TrainingStep, "measure", measure)
    keys, losses = [], []
    for micro_batch, at_once in ((None, 2), (1, 1), (9, 2), ("auto", 1)):
        counts.clear()
        run = Run(
            tmp_path / str(micro_batch), transformer, replace(BASE, steps=2, validation=ASIDE, micro_batch=micro_batch)
        ).go()
        assert set(counts) == {at_once} and sum(counts) == 12
        keys.append([(row["step"], row["split"], row["sample"], row["image_id"], row["sigma"]) for row in run.rows])
        losses.append([row["loss"] for row in run.rows if row["split"] == "validation"])
    assert keys == keys[:1] * 4 and losses == [losses[0], *[pytest.approx(losses[0], rel=1e-5)] * 3]


def test_a_step_is_replayed_with_the_plan_and_the_live_memory_limit_of_its_run(bounds, transformer, tmp_path, monkeypatch):
    run = Run(tmp_path, transformer, replace(BASE, memory="blocks", steps=5)).go()
    run.config = replace(run.config, memory="whole")
    seen, plans = noted(monkeypatch, limit), noted(monkeypatch, lambda *given: given[-1])
    for step in (1, 5):  # from the beginning, and from a checkpoint
        seen.clear()
        bounds.clear()
        found = replay_step(run.context(), ImageTask(run.context()), step)
        assert [one.loss for one in found] == [one.logged for one in found]
        assert bounds and set(seen) == set(bounds)
    assert set(plans) == {"blocks"}


def test_an_automatic_micro_batch_starts_between_one_sample_and_the_batch(transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(BASE, micro_batch="auto"))
    batch = batch_of(run)
    assert chosen(run).max_tokens == batch.samples * batch.tokens
    run.config = replace(BASE, micro_batch="auto", memory_gb=needs(run, "blocks", 1) * 1.001)
    assert chosen(run).max_tokens == batch.tokens


class MeasuredMemory:
    """Replaces MLX's memory readings of each step by a pair (held, peak), GB, and counts the samples computed at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, readings: list[tuple[float, float]]) -> None:
        self.sizes: list[list[int]] = []  # of each step: samples computed at once
        self.now, coming = (0.0, 0.0), iter(readings)
        step, gradients = TrainingStep.step, tuner_step.loss_and_grads

        def stepped(*given: Any, **named: Any) -> Any:
            self.sizes.append([])
            measured = step(*given, **named)
            self.now = next(coming)
            return measured

        def counted(*given: Any) -> Any:
            self.sizes[-1].append(given[3]["x_BLC"].shape[0])
            return gradients(*given)

        monkeypatch.setattr(TrainingStep, "step", stepped)
        monkeypatch.setattr(tuner_step, "loss_and_grads", counted)
        monkeypatch.setattr(mx, "get_active_memory", lambda: round(self.now[0] * 1e9))
        monkeypatch.setattr(mx, "get_peak_memory", lambda: round(self.now[1] * 1e9))


AUTOMATIC = replace(BASE, micro_batch="auto", memory_gb=1.0, batch_size=4, steps=5)


READINGS = [(0.1, 1.2), (0.1, 1.1), (0.1, 0.6), (0.1, 0.5), (0.1, 0.95)]


SIZES = [[4], [2, 2], [1, 1, 1, 1], [1, 1, 1, 1], [2, 2]]


def test_an_automatic_micro_batch_shrinks_after_a_peak_above_the_limit_and_grows_again_also_across_a_resume(
    transformer, tmp_path, monkeypatch
):
    measured_memory = MeasuredMemory(monkeypatch, READINGS)
    run = Run(tmp_path, transformer, AUTOMATIC, tables(((64, 64),) * 8)).go(stop_at=2)
    assert measured_memory.sizes == SIZES[:2]
    run.go()
    assert measured_memory.sizes == SIZES
    changes = [line for line in run.said if line.startswith("the micro-batch")]
    assert changes == [
        f"the micro-batch is now {n} tokens, {how} than before" for n, how in ((44, "fewer"), (22, "fewer"), (44, "more"))
    ]
    (last,) = (saved for saved in checkpoint.find_checkpoints(tmp_path / "artifacts") if saved.step == 5)
    assert last.state["max_tokens"] == 44


@pytest.mark.parametrize("checkpoint_every", [2, 1000])
def test_a_replay_computes_with_the_micro_batches_that_the_run_had(checkpoint_every, transformer, tmp_path, monkeypatch):
    begun = 4 if checkpoint_every == 2 else 0
    config = replace(AUTOMATIC, checkpoint_every=checkpoint_every)
    measured_memory = MeasuredMemory(monkeypatch, READINGS + READINGS[begun:])
    run = Run(tmp_path, transformer, config, tables(((64, 64),) * 8)).go()
    found = replay_step(run.context(), ImageTask(run.context()), 5)
    assert measured_memory.sizes == SIZES + SIZES[begun:]
    assert all(sample.loss == sample.logged for sample in found)
