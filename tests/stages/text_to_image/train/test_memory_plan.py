"""What fits into memory: the plan of a run, how much of a batch at once, and what is refused."""

from __future__ import annotations

import gc
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from stages.models.flux2.config import Flux2Config
from stages.models.folders import read_config
from stages.text_to_image.families import family
from stages.text_to_image.train import memory_plan, model
from stages.text_to_image.train.config import PreservationConfig, TrainConfig
from stages.text_to_image.train.selection import ValidationConfig
from stages.text_to_image.train.stage import STAGE
from stages.tuner import checkpoint, loop
from stages.tuner import step as tuner_step
from stages.tuner.blockwise import planner
from stages.tuner.blockwise.device import live_memory_limit
from stages.tuner.config import OptimizerConfig
from stages.tuner.loader import Loader
from stages.tuner.memory_plan import GB, MemoryPlan
from stages.tuner.step import TrainingStep
from tests.stages.text_to_image.train.runs import BASE, TINY, Run, tables, weights
from tests.stages.text_to_image.train.test_features import rich

PIXELS = TINY.architecture.pixels_per_token


def chosen(run: Run, start: Any = None) -> MemoryPlan:
    return run.task().memory_plan(start)


def estimator(config: TrainConfig, sizes: Any) -> memory_plan.MemoryEstimator:
    return memory_plan.MemoryEstimator(config, TINY.architecture, Flux2Config.from_dict(sizes))


def batch_of(run: Run) -> memory_plan.BatchShape:
    return memory_plan.largest_batch(run.task().sampler, PIXELS)


def needs(run: Run, plan: Any, samples: int = 2) -> float:
    """GB."""
    return estimator(run.config, read_config(run.transformer)).estimate(batch_of(run), samples).peak(plan) / GB


def test_the_plan_is_the_fastest_that_fits_the_budget_and_is_printed(transformer, tmp_path):
    run = Run(tmp_path, transformer)
    assert chosen(run).plan == "whole"
    whole, blocks = needs(run, "whole"), needs(run, "blocks")
    assert blocks < whole
    run.config = replace(BASE, memory_gb=(whole + blocks) / 2)
    assert chosen(run).plan == "blocks"
    assert run.said[-1].startswith("plan blocks: estimated peak ")
    run.config = replace(BASE, memory=1, memory_gb=whole)
    assert chosen(run).plan == 1


def test_what_cannot_fit_is_refused_before_a_weight_is_loaded_with_the_setting_that_would(transformer, tmp_path, monkeypatch):
    wide = weights(tmp_path / "wide", attention_head_dim=32, axes_dims_rope=(8, 8, 8, 8))
    run = Run(tmp_path, wide, replace(BASE, memory_gb=needs(Run(tmp_path, wide), "blocks") * 0.95))
    monkeypatch.setattr(model, "load_transformer", lambda *given: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match=r"^train: plan blocks needs about .* at 96 x 64 px, .* would need .* GB$") as caught:
        run.go()
    assert "micro_batch = 1" in str(caught.value)
    run.config = replace(run.config, batch_size=1, memory_gb=needs(run, "blocks", 1) * 0.95)
    with pytest.raises(ValueError, match=r"\[train\] base_bits = 8 would need"):
        run.go()
    run.config = replace(run.config, memory_gb=1e-6)
    with pytest.raises(
        ValueError,
        match=r'base_bits = 4; \[train.optimizer\] kind = "adamw8bit" would need .* GB, too much as well; '
        r"choose a smaller family, or train on a device with more memory$",
    ):
        run.go()
    run.config = replace(run.config, base_bits=4, optimizer=OptimizerConfig(kind="lion"))
    with pytest.raises(
        ValueError, match=r"no setting would need less; choose a smaller family, or train on a device with more memory$"
    ):
        run.go()
    run.config = replace(run.config, memory="whole", memory_gb=needs(run, "whole", 1) * 0.99)
    with pytest.raises(ValueError, match=r'plan whole needs .* memory = "blocks" would need'):
        run.go()


def refused(run: Run) -> tuple[dict[str, Any], float]:
    """The settings that a refusal names, and what it says that they need, GB: as they stand in its line."""
    with pytest.raises(ValueError) as caught:
        chosen(run)
    line = str(caught.value)
    assert "\n" not in line and "too much" not in line
    found = re.fullmatch(r"train: plan .* may take: (.*) would need (.*) GB", line)
    assert found
    parts = [re.fullmatch(r"(\[.*?\]) (.*)", part) for part in found[1].split("; ")]
    return tomllib.loads("\n".join(f"{part[1]}\n" + part[2].replace(", ", "\n") for part in parts if part)), float(found[2])


ALL = {"memory": "blocks", "micro_batch": 1, "base_bits": 4, "optimizer": {"kind": "adamw8bit"}}


def with_settings(config: TrainConfig, section: dict[str, Any]) -> TrainConfig:
    """The same with what stands in the section [train] of a file."""
    method = {"optimizer": OptimizerConfig(**section["optimizer"])} if "optimizer" in section else {}
    return replace(config, **section | method)


@pytest.mark.parametrize("names", [("micro_batch", "base_bits"), ("base_bits", "optimizer"), tuple(ALL)], ids=" and ".join)
def test_where_only_several_settings_together_fit_a_refusal_names_them_all_and_they_are_accepted(names, deep, tmp_path):
    config = replace(BASE, rank=16, batch_size=1 if names == ("base_bits", "optimizer") else 4)
    if "memory" in names:
        config = replace(config, memory="whole")
    run = Run(tmp_path, deep, config, tables(((128, 128),) * 8))
    run.config = with_settings(config, {name: ALL[name] for name in names})
    limit = needs(run, "blocks", 1) * 1.0001
    for left_out in names:
        run.config = replace(with_settings(config, {name: ALL[name] for name in names if name != left_out}), memory_gb=limit)
        plan = "whole" if run.config.memory == "whole" else "blocks"
        assert needs(run, plan, run.config.micro_batch or config.batch_size) > limit
    run.config = replace(config, memory_gb=limit)
    settings, said = refused(run)
    assert settings == {"train": {name: ALL[name] for name in names}}
    assert said == pytest.approx(limit, rel=0.01)
    run.config = with_settings(run.config, settings["train"])
    assert chosen(run).plan == "blocks"


def test_the_refusal_of_klein_9b_in_a_batch_of_8_at_1024_px_in_11_gb_names_micro_batches_and_4_bits(monkeypatch):
    monkeypatch.setattr("stages.models.attention.fused_gradient", lambda q_BHLK: True)
    klein = estimator(TrainConfig(batch_size=8), family("klein-base-9b").transformer)
    with pytest.raises(ValueError, match=r"may take: \[train\] micro_batch = 1, base_bits = 4 would need (9|10)\..* GB$"):
        memory_plan.require_fit(klein, memory_plan.BatchShape(8, 1024, 1024, 512, PIXELS), int(11e9))


def test_a_refusal_names_no_setting_that_is_not_needed_beside_the_others(deep, tmp_path):
    run = Run(tmp_path, deep, replace(BASE, rank=2, batch_size=2, base_bits=4), tables(((64, 64),) * 4))
    run.config = replace(BASE, rank=2, batch_size=2, memory_gb=needs(run, "blocks") * 1.0001)
    assert needs(replace(run, config=replace(run.config, micro_batch=1)), "blocks", 1) > run.config.memory_gb
    settings, _ = refused(run)
    assert settings == {"train": {"base_bits": 4}}


@pytest.mark.parametrize("aside", [None, ValidationConfig(paths=("image3",))], ids=["trained", "held out"])
def test_where_no_settings_fit_the_highest_resolution_that_does_is_named_and_it_is_accepted(aside, deep, tmp_path):
    run = Run(tmp_path, deep, replace(BASE, batch_size=1, validation=aside), tables(((64, 64),) * 3 + ((640, 480),)))
    least = with_settings(run.config, {"base_bits": 4, "optimizer": ALL["optimizer"]})

    def at(side: int) -> float:
        return needs(Run(tmp_path, deep, least, tables(((64, 64),) * 3 + ((side, side),))), "blocks", 1)

    run.config = replace(run.config, memory_gb=at(352) * 1.0001)
    assert at(368) > run.config.memory_gb
    settings, said = refused(run)
    assert settings == {"train": {"base_bits": 4, "optimizer": ALL["optimizer"]}, "buckets": {"resolutions": [352]}}
    assert said == pytest.approx(at(352), rel=0.01)
    run.config = with_settings(run.config, settings["train"])
    run.tables = tables(((64, 64),) * 3 + ((352, 352),))
    assert chosen(run).plan == ("whole" if aside else "blocks"), "a measurement's need is the same in every plan"
    run.config = replace(run.config, memory_gb=at(256) * 0.999)
    run.tables = tables(((64, 64),) * 3 + ((640, 480),))
    with pytest.raises(
        ValueError, match=r"resolutions = \[256\] would need .* GB, too much as well; choose a smaller family, or"
    ):
        chosen(run)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer whose blocks outweigh the optimizer's step."""
    sizes = {"num_layers": 2, "num_single_layers": 4, "num_attention_heads": 4, "attention_head_dim": 32}
    return weights(tmp_path_factory.mktemp("deep") / "transformer", **sizes, axes_dims_rope=(8, 8, 8, 8))


def test_between_whole_and_blocks_the_plan_keeps_the_activations_of_as_many_blocks_as_fit_to_the_byte(deep, tmp_path):
    run = Run(tmp_path, deep, replace(BASE, batch_size=1))
    bytes_of = {plan: round(needs(run, plan, 1) * GB) for plan in ("blocks", 2, 3, "whole")}
    for plan, need in bytes_of.items():
        run.config = replace(run.config, memory_gb=(need + 0.5) / GB)
        assert chosen(run).plan == plan
    for less, plan in (("blocks", 2), (2, 3)):
        run.config = replace(run.config, memory_gb=(bytes_of[plan] - 0.5) / GB)
        assert chosen(run).plan == less


def test_a_run_prints_its_plan_and_its_estimated_peak_before_its_first_row_and_trains_with_that_plan(deep, tmp_path, monkeypatch):
    run = Run(tmp_path, deep, replace(BASE, batch_size=1, steps=2))
    run.config = replace(run.config, memory_gb=needs(run, 2, 1) * 1.00001)
    plans = []
    real = tuner_step.loss_and_grads
    monkeypatch.setattr(tuner_step, "loss_and_grads", lambda *given: [plans.append(given[-1]), real(*given)][1])
    rows = STAGE.run(run.context())
    next(rows)
    estimated = f"estimated peak {needs(run, 2, 1):.2g} GB of {run.config.memory_gb:.3g} GB"
    assert f"plan 2 (the last 2 of 6 blocks are not computed twice): {estimated}" in run.said
    list(rows)
    assert plans == [2, 2]


def peak_of(run: Run, steps: int = 2) -> int:
    """Bytes at the most in the first steps, beside what lay there before."""
    gc.collect()  # what another test left would else be let go in between
    before = mx.get_active_memory()
    made = run.training()
    made.plan, made.live_bytes = run.config.memory, 1
    mx.reset_peak_memory()
    for _, batches, _ in Loader(run.task(), range(1, steps + 1)):
        made.step(batches, 1e-4)
    return mx.get_peak_memory() - before


@pytest.mark.parametrize(
    "more",
    [{"accumulate": 2}, {"batch_size": 2, "micro_batch": 1}, {"preservation": PreservationConfig()}],
    ids=["several batches", "micro-batches", "preservation"],
)
def test_adding_up_gradients_is_estimated_to_need_the_adapters_size_once_more_and_does(more, deep, tmp_path):
    plain = replace(BASE, batch_size=1, rank=16, memory="whole", caption_dropout=0.0)
    runs = [Run(tmp_path, deep, config, rich(((128, 128),) * 4)) for config in (plain, replace(plain, **more))]
    expected, measured = [needs(run, "whole", 1) * GB for run in runs], [peak_of(run) for run in runs]
    adapter = estimator(plain, read_config(deep)).adapter
    assert expected[1] - expected[0] == pytest.approx(adapter)
    assert measured[1] - measured[0] == pytest.approx(adapter, rel=0.25)


@pytest.mark.parametrize(("samples", "variant"), [(None, "lora"), (1, "lora"), (None, "dora"), (None, "lokr")])
def test_the_estimate_includes_held_out_images_that_are_larger_than_all_others(samples, variant, deep, tmp_path):
    aside = ValidationConfig(paths=("image3",), sigmas=(0.2, 0.8))
    config = replace(BASE, memory="blocks", micro_batch=samples, variant=variant, validation=aside)
    run = Run(tmp_path, deep, config, tables(((64, 64),) * 3 + ((384, 384),)))
    batch = batch_of(run)
    assert batch.held and (batch.width, batch.held.width) == (64, 384)
    gc.collect()  # what another test left would else be let go in between
    before = mx.get_active_memory()
    made = run.training()
    made.live_bytes = 1
    held_out = run.task().held_out
    assert held_out
    mx.reset_peak_memory()
    for micro_batch in held_out.micro_batches():
        made.measure(micro_batch)
    measured = mx.get_peak_memory() - before
    assert 1 / planner.FACTOR < needs(run, "blocks", samples or 2) * GB / measured < planner.FACTOR
    trained = needs(Run(tmp_path, deep, replace(config, validation=None), tables(((64, 64),) * 3)), "blocks", samples or 2)
    assert trained * GB < measured / planner.FACTOR


def test_gradients_are_added_up_without_a_third_copy_of_any(deep, tmp_path):
    config = replace(BASE, batch_size=1, rank=64, accumulate=3, precision="bfloat16", memory="blocks")
    run = Run(tmp_path, deep, config, tables(((64, 64),) * 4))
    made = run.training()
    made.plan = "blocks"
    batches = run.micro_batches(1)
    gc.collect()  # what another test left would else be let go in between
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with live_memory_limit(1):
        found = made.gradient(batches)
        mx.eval(found.grads, found.losses)
    # The sum, one micro-batch's gradient and the adapter, both bfloat16, and what one block needs.
    assert mx.get_peak_memory() - before < 2.4 * made.masters.nbytes


def test_a_run_keeps_the_plan_that_it_began_with_unless_a_setting_or_memory_says_otherwise(transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(BASE, memory="blocks")).go(stop_at=2)
    (start,) = checkpoint.find_checkpoints(tmp_path / "artifacts")
    run.config = BASE
    assert chosen(run, start).plan == "blocks"
    assert not any("goes on with" in line for line in run.said)
    run.config = replace(BASE, memory="whole")
    assert chosen(run, start).plan == "whole"
    assert any(line.startswith("the run began with plan blocks and goes on with plan whole") for line in run.said)


def test_the_plan_of_a_run_changes_no_row_but_for_rounding(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(BASE, memory="blocks")).go()
    for ours, theirs in zip(run.rows, whole.rows, strict=True):
        assert ours.pop("loss") == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours.pop("grad_norm") == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert ours.items() <= theirs.items()


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

        def stepped(*given: Any) -> Any:
            self.sizes.append([])
            measured = step(*given)
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


def test_an_automatic_micro_batch_shrinks_after_a_peak_above_the_limit_and_grows_again(transformer, tmp_path, monkeypatch):
    measured_memory = MeasuredMemory(monkeypatch, READINGS)
    run = Run(tmp_path, transformer, AUTOMATIC, tables(((64, 64),) * 8)).go()
    assert measured_memory.sizes == SIZES
    changes = [line for line in run.said if line.startswith("the micro-batch")]
    assert changes == [
        f"the micro-batch is now {n} tokens, {how} than before" for n, how in ((44, "fewer"), (22, "fewer"), (44, "more"))
    ]
    (last,) = (saved for saved in checkpoint.find_checkpoints(tmp_path / "artifacts") if saved.step == 5)
    assert last.state["max_tokens"] == 44


def test_a_resumed_run_goes_on_with_the_micro_batch_size_of_its_last_step(transformer, tmp_path, monkeypatch):
    measured_memory = MeasuredMemory(monkeypatch, READINGS)
    run = Run(tmp_path, transformer, AUTOMATIC, tables(((64, 64),) * 8)).go(stop_at=2)
    assert measured_memory.sizes == SIZES[:2]
    run.go()
    assert measured_memory.sizes == SIZES


def test_an_automatic_micro_batch_changes_no_row_but_for_rounding(whole, transformer, tmp_path, monkeypatch):
    sizes = iter([10, 22, 5, 40, 22, 10, 22])
    monkeypatch.setattr(loop, "adjust_max_tokens", lambda *given: next(sizes))
    run = Run(tmp_path, transformer, replace(BASE, micro_batch="auto")).go()
    for ours, theirs in zip(run.rows, whole.rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert any(line.startswith("the micro-batch is now 10 tokens, fewer") for line in run.said)
