"""Every feature of training, on tiny random weights: that it does what it says, and that a run with it resumes to the bit."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from stages.text_to_image.train.config import LossConfig, TLoraConfig, ValidationConfig
from stages.text_to_image.train.task import ImageTask
from stages.tuner import checkpoint
from stages.tuner.adapters import lora
from stages.tuner.config import EmaConfig, OptimizerConfig
from stages.tuner.replay import replay_step
from tests.stages.text_to_image.train.runs import BASE, EVERYTHING, Run, rich_tables

ARTIFACTS = "artifacts"
LONG = pytest.mark.proof("with every feature on, runs broken at other steps end with the bits of an unbroken one", long=True)


@pytest.fixture(scope="module")
def transformer(wide: Path) -> Path:
    return wide


@pytest.fixture(scope="module")
def whole(transformer: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = replace(EVERYTHING, tlora=TLoraConfig(1), rank_dropout=0.25)
    return Run(tmp_path_factory.mktemp("whole"), transformer, config, rich_tables()).go()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=LONG) for seed in (1, 2))])
def test_with_every_feature_on_a_broken_run_ends_with_the_bits_of_an_unbroken_one(seed, whole, transformer, tmp_path):
    draw = random.Random(seed)
    run = Run(tmp_path, transformer, whole.config, rich_tables())
    for _ in range(3):
        at = draw.randint(1, 5)
        run.go(**({"stop_at": at} if draw.random() < 0.5 else {"kill_at": at, "lose": draw.randint(0, 9)}))
    run.go()
    assert run.rows == whole.rows
    for name in (checkpoint.ADAPTER, checkpoint.EMA, checkpoint.BEST, f"checkpoints/step-000006/{checkpoint.OPTIMIZER}"):
        assert (run.folder / ARTIFACTS / name).read_bytes() == (whole.folder / ARTIFACTS / name).read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": OptimizerConfig(kind="adafactor"), "variant": "dora", "ema": EmaConfig()},
        {"optimizer": OptimizerConfig(kind="lion"), "variant": "lokr", "factor": 4},
        {"optimizer": OptimizerConfig(kind="prodigy"), "lr": 1.0, "rslora": True, "alpha": 2.0, "memory": "blocks"},
        {
            "rank_for": {"attn.to_q": 4, "attn.*": 1},
            "alpha_for": {"attn.to_q": 1.0},
            "base_bits": 4,
            "base_bits_for": {"single_transformer_blocks.*": 8},
            "micro_batch": 1,
        },
        {"tlora": TLoraConfig(min_rank=1, start="zero"), "rank_dropout": 0.3, "rank": 4, "base_bits": 4, "memory": "blocks"},
    ],
    ids=lambda change: " ".join(map(str, change)),
)
def test_every_method_and_variant_trains_and_resumes_to_the_bit(change, transformer, tmp_path):
    config = replace(BASE, steps=4, **change)
    straight = Run(tmp_path / "a", transformer, config).go()
    broken = Run(tmp_path / "b", transformer, config).go(stop_at=2).go()
    assert broken.rows == straight.rows
    assert broken.adapter == straight.adapter
    assert all(np.isfinite(row["loss"]) for row in straight.rows)
    assert lora.largest_change(mx.load(str(straight.folder / ARTIFACTS / checkpoint.ADAPTER))).item() > 0


def test_neither_measuring_a_run_nor_its_loss_changes_the_other(transformer, tmp_path):
    def run(**settings) -> Run:
        aside = ValidationConfig(paths=("image0",), every=settings.pop("every"))
        config = replace(BASE, steps=2, validation=aside, **settings)
        return Run(tmp_path / str(len(list(tmp_path.iterdir()))), transformer, config).go()

    plain, seldom = run(every=1), run(every=2)
    assert plain.adapter == seldom.adapter
    other = run(every=2, loss=LossConfig(kind="pseudo_huber", weight="bell"))
    first = [[row for row in each.rows if row["step"] <= 1] for each in (other, seldom)]
    for ours, theirs in zip(*first, strict=True):
        assert (ours["loss"] == theirs["loss"]) == (ours["split"] == "validation")


def test_patience_ends_a_run_and_more_patience_makes_it_go_on(transformer, tmp_path):
    stuck = ValidationConfig(paths=("image0",), every=1, patience=2, min_delta=100.0)
    run = Run(tmp_path, transformer, replace(BASE, validation=stuck)).go()
    assert max(step for step, _, _ in run.stored) == 2
    assert any("ended after step 2" in line for line in run.said)
    assert checkpoint.published_step(tmp_path / ARTIFACTS) == 2
    run.loaded = 0
    run.go()
    assert run.loaded == 0
    run.config = replace(run.config, validation=replace(stuck, patience=4))
    run.go()
    assert checkpoint.published_step(tmp_path / ARTIFACTS) == 4
    longest = Run(tmp_path / "other", transformer, run.config).go()
    assert (run.rows, run.adapter) == (longest.rows, longest.adapter)


def test_the_best_adapter_is_that_of_the_lowest_validation_loss(whole):
    means: dict[int, list[float]] = {}
    for row in whole.rows:
        if row["split"] == "validation" and row["step"]:
            means.setdefault(row["step"], []).append(row["loss"])
    best = min(means, key=lambda step: np.mean(means[step]))
    kept = whole.folder / ARTIFACTS / f"checkpoints/step-{best:06d}" / checkpoint.ADAPTER
    assert (whole.folder / ARTIFACTS / checkpoint.BEST).read_bytes() == kept.read_bytes()


def test_a_step_replayed_gives_its_logged_losses_and_writes_nothing_and_one_that_there_is_not_is_refused(whole):
    before = {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*")}
    for step in (3, 4):  # from the beginning and from a checkpoint; without preservation and with it
        found = replay_step(whole.context(), ImageTask(whole.context()), step)
        assert [one.loss for one in found] == [one.logged for one in found]
        assert len(found) == len([row for row in whole.rows if (row["step"], row["split"]) == (step, "train")])
    with pytest.raises(ValueError, match="replay: the step must be 1 to 6, got 7"):
        replay_step(whole.context(), ImageTask(whole.context()), 7)
    assert before == {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*")}
