"""T-LoRA and rank dropout: which ranks a sample trains, and that a batch of several noise levels trains each sample's own."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from pipeline.project.recipe import recorded
from stages.text_to_image.train.config import NoiseConfig, PreservationConfig, TLoraConfig, TrainConfig
from stages.tuner.adapters import lora
from stages.tuner.adapters.masks import RankMasks, active_ranks
from stages.tuner.memory import MemoryPlan
from tests.stages.text_to_image.train.runs import BASE, Run, rich_tables, tables
from tests.stages.text_to_image.train.test_step import SPLIT, distance, step_of
from tests.stages.tuner.blockwise.test_backprop import assert_same

RANK = 4
LEVELS = NoiseConfig(base="uniform", shift="none")
TLORA = replace(BASE, rank=RANK, batch_size=3, tlora=TLoraConfig(min_rank=1), noise=LEVELS, caption_dropout=0.0)


def test_the_active_ranks_are_those_of_the_authors_code_at_every_step():
    for rank, least in ((32, 1), (64, 32), (4, 4)):
        theirs = [int(((1000 - t) / 1000) ** 1 * (rank - least)) + least for t in range(1000)]
        assert [active_ranks(t / 1000, rank, least) for t in range(1000)] == theirs
    assert [active_ranks(1.0, rank) for rank in (64, 5, 1)] == [32, 2, 1], "the paper's half"


def test_each_sample_of_a_batch_trains_its_own_first_ranks(transformer, tmp_path):
    run = Run(tmp_path, transformer, TLORA, tables(((64, 64),) * 4))
    training, (batch,) = step_of(run)
    active = [active_ranks(sample.sigma, RANK, 1) for sample in batch.samples]
    assert len(set(active)) > 1
    found = training.gradient([batch])
    training.objective = replace(training.objective, masks=None)
    adapter, losses, total = training.adapter, [], dict.fromkeys(found.grads, 0.0)
    for n, ranks in enumerate(active):
        (term,) = training.objective.terms(training.model, batch.select(n, n + 1))
        # Ranks that a sample does not have are zero in A, and get no gradient.
        cut = {name: a * (mx.arange(RANK) < ranks)[:, None] if name.endswith(lora.A) else a for name, a in adapter.items()}
        loss, grads = training._loss_and_grads(batch.select(n, n + 1), term, cut)
        losses.append(loss.item())
        for name, grad in grads.items():
            kept = mx.arange(RANK) < ranks
            total[name] += grad * (kept[:, None] if name.endswith(lora.A) else kept) / len(active)
    np.testing.assert_allclose(np.array(found.losses), losses, rtol=1e-5)
    assert_same(found.grads, total, SPLIT)


def test_plans_and_micro_batches_give_the_same_masked_gradient(transformer, tmp_path):
    config = replace(TLORA, rank_dropout=0.4, base_bits=4, accumulate=2, preservation=PreservationConfig())
    made, batches = step_of(Run(tmp_path, transformer, config, rich_tables()))
    whole = made.gradient(batches)
    for plan, samples in (("blocks", None), (2, 2), ("blocks", 1)):
        made.memory = MemoryPlan(plan, max_samples=samples)
        found = made.gradient(batches)
        assert_same(found.grads, whole.grads, SPLIT)
        assert distance(found.grads, whole.grads) < 2e-6


def test_dropout_leaves_out_its_share_of_ranks_and_keeps_the_mean():
    class One:
        step, number, sigma = 3, 1, 0.5

    from stages.tuner.adapters.targets import Target

    targets = [Target(f"q{n}", 8, 8, 8, 8.0) for n in range(400)]
    masks = np.stack([np.array(mask) for mask in RankMasks(7, dropout=0.25)([One()], targets).values()])
    assert set(np.unique(masks)) == {0.0, np.float32(1 / 0.75)}
    assert masks.mean() == pytest.approx(1, abs=0.03)
    again = RankMasks(7, dropout=0.25)([One()], targets)
    assert all(np.array_equal(mask, again[f"q{n}"]) for n, mask in enumerate(masks))


def test_without_masks_no_recipe_knows_of_them_and_with_another_adapter_they_are_refused():
    assert not {"tlora", "rank_dropout"} & recorded(TrainConfig()).keys()
    with pytest.raises(ValueError, match='tlora needs variant = "lora", got "dora"'):
        TrainConfig(tlora=TLoraConfig(), variant="dora")
    with pytest.raises(ValueError, match="min_rank must be at most the rank, 32, got 33"):
        TrainConfig(tlora=TLoraConfig(min_rank=33))
