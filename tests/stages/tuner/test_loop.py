"""The training loop with a task of its own: token ids and a contrastive loss over a whole batch."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from stages.tuner import checkpoint, loop, step
from stages.tuner.blockwise.backprop import BlockwiseBackprop
from stages.tuner.config import EmaConfig, ScheduleConfig
from stages.tuner.loop import schedule_warnings
from stages.tuner.memory import MemoryPlan, after_shortage
from stages.tuner.optimizers.step import OptimizerStep
from stages.tuner.ranks import Ranks
from stages.tuner.replay import remake_checkpoints
from tests.stages.tuner.toy import A_MINUTE_A_READING, CONFIG, HELD, PAIRS, Contrast, ToyEstimator, ToyRun, ToyTask, read_pairs


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return ToyRun(tmp_path_factory.mktemp("whole") / "artifacts").go()


@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_is_stopped_and_killed_ends_with_the_bits_of_an_unbroken_one(seed, whole, tmp_path):
    draw = random.Random(seed)
    run = ToyRun(tmp_path / "artifacts")
    for _ in range(3):
        at = draw.randint(1, 6)
        run.go(**({"stop_at": at} if draw.random() < 0.5 else {"kill_at": at, "lose": draw.randint(0, 4)}))
    run.go()
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


def test_mlx_is_configured_after_the_ranks_are_connected_and_before_their_first_exchange(tmp_path, monkeypatch):
    asked: list[str] = []

    class Watched(Ranks):
        def each(self, value):
            asked.append("exchange")
            return super().each(value)

    real = loop.configure_scheduler
    monkeypatch.setattr(loop, "connect", lambda: [asked.append("connect"), Watched()][1])
    monkeypatch.setattr(loop, "configure_scheduler", lambda: [asked.append("configure"), real()][1])
    ToyRun(tmp_path, replace(CONFIG, steps=1)).go()
    assert asked[:3] == ["connect", "configure", "exchange"]


def test_a_damaged_checkpoint_is_made_again_with_all_that_its_state_says(tmp_path):
    config = replace(CONFIG, checkpoint_every=1000, checkpoint_minutes=1e-9, validation=None)
    run = ToyRun(tmp_path, config).go(kill_at=5, clock=A_MINUTE_A_READING)
    (saved,) = checkpoint.find_checkpoints(run.folder)
    before = {path.name: path.read_bytes() for path in saved.folder.iterdir()}
    (saved.folder / checkpoint.ADAPTER).write_bytes(b"short")
    task = ToyTask(config)
    assert list(remake_checkpoints(run.context(task), task)) == ["the checkpoint of step 5 was made again"]
    after = {path.name: path.read_bytes() for path in saved.folder.iterdir()}
    assert saved.state["timed"] and before[checkpoint.STATE] == after[checkpoint.STATE] and before == after


def test_a_run_made_longer_equals_one_that_was_long_from_the_start(whole, tmp_path):
    run = ToyRun(tmp_path / "artifacts", replace(CONFIG, steps=4)).go()
    assert checkpoint.published_step(run.folder) == 4
    run.config = CONFIG
    run.go()
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


def test_there_is_a_row_for_every_sample_drawn_and_for_every_sample_measured(whole):
    trained = [row for row in whole.rows if row["split"] == "train"]
    measured = [row for row in whole.rows if row["split"] == "validation"]
    assert [(row["step"], row["sample"]) for row in trained] == [(step, n) for step in range(1, 8) for n in range(8)]
    assert {row["pair"] for row in trained} == set(range(PAIRS)) - set(HELD)
    assert [(row["step"], row["pair"]) for row in measured] == [(step, pair) for step in (0, 2, 4, 6) for pair in HELD]
    assert all(np.isfinite(row["loss"]) and row["remark"] is None for row in whole.rows)
    assert np.mean([row["loss"] for row in trained[-8:]]) < np.mean([row["loss"] for row in trained[:8]])


def test_the_loss_of_a_batch_is_computed_over_all_its_samples(whole, tmp_path):
    task = ToyTask(CONFIG)
    training = loop.load_training(task, None)
    batches = [read_pairs(samples) for samples in task.draw(1)]
    training.memory = MemoryPlan(max_samples=1, max_tokens=10)
    assert [len(batch.samples) for batch in training.split(batches)] == [4, 4]
    losses = training.gradient(batches).losses.tolist()
    assert losses == [row["loss"] for row in whole.rows if (row["step"], row["split"]) == (1, "train")]
    alone = training.gradient([batches[0].select(0, 1)]).losses.tolist()
    assert alone == [0.0] and losses[0] > 0, "a query alone has no negative"


@pytest.mark.parametrize("micro_batch", [1, "auto"])
def test_a_micro_batch_that_would_divide_a_loss_over_the_whole_batch_is_refused(micro_batch, tmp_path):
    with pytest.raises(ValueError, match=r"\[train\] micro_batch must be unset: the loss compares all samples of a batch"):
        ToyRun(tmp_path / "artifacts", replace(CONFIG, micro_batch=micro_batch)).go()


def test_an_average_of_the_adapter_is_published_beside_it_changes_it_not_and_resumes_to_the_bit(whole, tmp_path):
    config = replace(CONFIG, ema=EmaConfig(0.5))
    straight = ToyRun(tmp_path / "a", config).go()
    broken = ToyRun(tmp_path / "b", config).go(stop_at=3).go()
    averages = [(run.folder / checkpoint.EMA).read_bytes() for run in (straight, broken)]
    assert averages[0] == averages[1] != straight.adapter == whole.adapter


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (ScheduleConfig(warmup_steps=20), "all 10 steps are warm-up"),
        (ScheduleConfig("cosine", warmup_steps=2, decay_steps=4), "from step 6 on the rate is 0 and nothing is trained"),
        (ScheduleConfig("linear", warmup_steps=2, decay_steps=40), "the rate reaches its floor at step 42"),
        (ScheduleConfig("linear", warmup_steps=2, decay_steps=8), ""),
        (ScheduleConfig("linear", warmup_steps=2, decay_steps=4, floor=0.1), ""),
        (ScheduleConfig(warmup_steps=2), ""),
    ],
)
def test_a_schedule_that_does_not_suit_the_number_of_steps_is_reported(schedule, said):
    lines = list(schedule_warnings(replace(CONFIG, steps=10, schedule=schedule)))
    assert len(lines) == bool(said) and all(line.startswith(said) for line in lines)


PLACES = {
    "the forward and backward pass of blocks": (BlockwiseBackprop, "tail"),
    "the optimizer's step, half done": (OptimizerStep, "_update_stacks"),
    "the end of the optimizer's step": (step, "is_finite"),
    "copying the batch": (Contrast, "validation_term"),
    "a measurement": (step, "predict"),
}
TEXTS = (
    "cudaMallocAsync(&data, size, stream) failed: out of memory",
    "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory).",
    "[malloc] Unable to allocate 71303168 bytes.",
)


def fail(monkeypatch, place, times=10**6):
    """From step 4 on, the place computes and then raises, `times` times. Returns a function to call after each step."""
    owner, name = PLACES[place]
    real, armed, held = getattr(owner, name), [False], []

    def failing(*given, **more):
        found = real(*given, **more)
        if armed[0] and len(held) < times:
            held.append(mx.get_active_memory())
            large = mx.zeros(1 << 22)  # held by the traceback
            mx.eval(large, found)
            assert held[-1] < held[0] + large.nbytes, "what the attempt before held is freed"
            raise RuntimeError(TEXTS[len(held) % len(TEXTS)])
        return found

    monkeypatch.setattr(owner, name, failing)
    return lambda done: armed.__setitem__(0, done >= 3)


@pytest.fixture(scope="module")
def with_plan_after(tmp_path_factory):
    """A function (plan, step) -> a run that computes by this plan after the step."""

    @functools.cache
    def run(plan, step):
        first = ToyRun(tmp_path_factory.mktemp("plan") / "run", replace(CONFIG, checkpoint_every=step)).go(kill_at=step)
        first.config = replace(first.config, memory=plan)
        return first.go()

    return run


@pytest.mark.parametrize(
    ("place", "times", "plan"),
    [*((place, 3, "blocks") for place in PLACES), ("the optimizer's step, half done", 1, "whole"), ("a measurement", 2, 2)],
)
def test_a_step_without_memory_is_repeated_and_then_goes_on_with_a_smaller_plan(
    place, times, plan, whole, with_plan_after, tmp_path, monkeypatch
):
    last = 4 if place == "a measurement" else 3  # finished step
    expected = whole if plan == "whole" else with_plan_after(plan, last)
    run, cleared, real = ToyRun(tmp_path / "run"), [], mx.clear_cache
    monkeypatch.setattr(mx, "clear_cache", lambda: [cleared.append(1), real()][1])
    run.go(after=fail(monkeypatch, place, times))
    assert len(cleared) == times
    assert (run.rows, run.adapter) == (expected.rows, expected.adapter)
    assert checkpoint.find_checkpoints(run.folder)[0].state["plan"] == plan
    said = [line for line in run.said if "not enough memory" in line]
    ways = ["once more, with MLX's cache freed", "with plan 2 in place of whole", "with plan blocks in place of 2"]
    assert len(said) == times and all(way in line for way, line in zip(ways, said, strict=False))


@pytest.mark.parametrize("place", ["the optimizer's step, half done", "a measurement"])
def test_a_run_that_finds_no_memory_at_all_ends_with_what_would_fit_and_keeps_its_last_finished_step(
    place, whole, tmp_path, monkeypatch
):
    run = ToyRun(tmp_path / "run", replace(CONFIG, checkpoint_every=100, memory="blocks"))
    last = 4 if place == "a measurement" else 3
    with (
        monkeypatch.context() as patched,
        pytest.raises(ValueError, match=r"^train: plan blocks needs about .* would need") as told,
    ):
        run.go(after=fail(patched, place))
    assert str(told.value).endswith("Finished steps are kept: the same command goes on.") and "\n" not in str(told.value)
    assert checkpoint.find_checkpoints(run.folder)[0].step == last
    run.go()
    expected = ToyRun(tmp_path / "expected", replace(CONFIG, memory="blocks")).go()
    assert (run.rows, run.adapter) == (expected.rows, expected.adapter)


def test_a_fixed_plan_is_kept_and_micro_batches_are_halved_only_if_they_are_auto():
    plan, auto = MemoryPlan("whole", 10**9, 40, None, 10**9), replace(CONFIG, micro_batch="auto")
    found = []
    while after := after_shortage(ToyEstimator(auto), plan, 10**6, smaller=True):
        plan = after
        found.append((plan.plan, plan.max_tokens))
    assert found == [(2, 40), ("blocks", 40), ("blocks", 20), ("blocks", 10)]
    assert not plan.grows and plan.live_bytes <= 10**6
    assert after_shortage(ToyEstimator(replace(CONFIG, memory="whole")), MemoryPlan("whole"), 10**6, smaller=True) is None


def test_any_other_error_of_a_step_is_raised_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "predict", lambda *given: (_ for _ in ()).throw(RuntimeError("shapes cannot be broadcast")))
    with pytest.raises(RuntimeError, match="broadcast"):
        ToyRun(tmp_path).go()
