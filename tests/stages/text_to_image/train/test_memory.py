"""The memory plan of a run: the fastest that fits, and estimates beside measured peaks."""

from __future__ import annotations

import gc
from dataclasses import replace

import mlx.core as mx
import pytest

from stages import kernels
from stages.memory import FACTOR, GB
from stages.models.folders import read_config
from stages.text_to_image.train import memory
from stages.text_to_image.train.config import PreservationConfig, ValidationConfig
from stages.text_to_image.train.stage import STAGE
from stages.tuner import checkpoint
from stages.tuner.blockwise.device import live_memory_limit
from stages.tuner.loop import Loader
from tests.stages.text_to_image.train.plans import batch_of, chosen, estimator, needs, noted
from tests.stages.text_to_image.train.runs import BASE, Run, rich_tables, tables


def test_the_plan_is_the_fastest_that_fits_to_the_byte_and_is_printed(deep, tmp_path):
    run = Run(tmp_path, deep, replace(BASE, batch_size=1))
    assert chosen(run).plan == "whole"
    bytes_of = {plan: round(needs(run, plan, 1) * GB) for plan in ("blocks", 2, 3, "whole")}
    for plan, need in bytes_of.items():
        run.config = replace(run.config, memory_gb=(need + 0.5) / GB)
        assert chosen(run).plan == plan and run.said[-1].startswith(f"plan {plan}")
    run.config = replace(run.config, memory=1)
    assert chosen(run).plan == 1, "the setting"
    for less, plan in (("blocks", 2), (2, 3)):
        run.config = replace(run.config, memory=BASE.memory, memory_gb=(bytes_of[plan] - 0.5) / GB)
        assert chosen(run).plan == less


def peak_of(run: Run, steps: int = 2) -> int:
    """Bytes at the most in the first steps, beside what lay there before."""
    gc.collect()  # what another test left would else be let go in between
    before = mx.get_active_memory()
    made = run.training()
    made.memory = replace(made.memory, plan=run.config.memory, live_bytes=1)
    mx.reset_peak_memory()
    for _, batches, _ in Loader(run.task(), range(1, steps + 1)):
        made.step(batches, 1e-4)
    return mx.get_peak_memory() - before


def test_adding_up_gradients_is_estimated_to_need_the_adapters_size_once_more_and_does(deep, tmp_path):
    plain = replace(BASE, batch_size=1, rank=16, memory="whole", caption_dropout=0.0)
    added = ({"accumulate": 2}, {"batch_size": 2, "micro_batch": 1}, {"preservation": PreservationConfig()})
    runs = [Run(tmp_path, deep, replace(plain, **more), rich_tables(((128, 128),) * 4)) for more in ({}, *added)]
    adapter = estimator(plain, read_config(deep), batch_of(runs[0])).adapter
    expected, measured = [needs(run, "whole", 1) * GB for run in runs], [peak_of(run) for run in runs]
    assert [each - expected[0] for each in expected[1:]] == [pytest.approx(adapter)] * 3
    assert [each - measured[0] for each in measured[1:]] == [pytest.approx(adapter, rel=0.25)] * 3


LONG = pytest.mark.proof("the estimate includes held-out images of every variant and micro-batch", long=True)


@pytest.mark.parametrize(
    ("samples", "variant"),
    [(1, "lora"), (None, "dora"), pytest.param(None, "lora", marks=LONG), pytest.param(None, "lokr", marks=LONG)],
)
def test_the_estimate_includes_held_out_images_that_are_larger_than_all_others(samples, variant, deep, tmp_path):
    aside = ValidationConfig(paths=("image3",), sigmas=(0.2, 0.8))
    config = replace(BASE, memory="blocks", micro_batch=samples, variant=variant, validation=aside)
    run = Run(tmp_path, deep, config, tables(((64, 64),) * 3 + ((256, 256),)))
    batch = batch_of(run)
    assert batch.held and (batch.width, batch.held.width) == (64, 256)
    gc.collect()  # what another test left would else be let go in between
    before = mx.get_active_memory()
    made = run.training()
    made.memory = replace(made.memory, live_bytes=1)
    held_out = run.task().held_out
    assert held_out
    mx.reset_peak_memory()
    for micro_batch in held_out.micro_batches():
        made.measure(micro_batch)
    measured = mx.get_peak_memory() - before
    assert 1 / FACTOR < needs(run, "blocks", samples or 2) * GB / measured < FACTOR
    trained = needs(Run(tmp_path, deep, replace(config, validation=None), tables(((64, 64),) * 3)), "blocks", samples or 2)
    assert trained * GB < measured / FACTOR


def test_gradients_are_added_up_without_a_third_copy_of_any(deep, tmp_path):
    config = replace(BASE, batch_size=1, rank=64, accumulate=3, precision="bfloat16", memory="blocks")
    run = Run(tmp_path, deep, config, tables(((64, 64),) * 4))
    made = run.training()
    made.memory = replace(made.memory, plan="blocks")
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


def test_on_metal_large_images_are_computed_one_at_a_time_unless_the_setting_says_otherwise(transformer, tmp_path, monkeypatch):
    run = Run(tmp_path, transformer)
    assert chosen(run).max_samples is None
    monkeypatch.setattr(kernels, "limited", lambda: True)
    assert batch_of(run).samples > 1 and batch_of(run).resolution < memory.ALONE
    assert chosen(run).max_samples is None
    together = needs(run, "blocks")
    monkeypatch.setattr(memory, "ALONE", batch_of(run).resolution)
    assert chosen(run).max_samples == 1
    run.config = replace(BASE, memory="blocks", memory_gb=0.999 * together)
    assert chosen(run).max_samples == 1, "the estimate is that of one sample"
    run.config = replace(BASE, micro_batch=2)
    assert chosen(run).max_samples == 2
    run.config = replace(BASE, steps=1)
    widths = noted(monkeypatch, lambda *given: len(given[3]["timesteps_B"]))
    list(STAGE.run(run.context()))
    assert set(widths) == {1}
