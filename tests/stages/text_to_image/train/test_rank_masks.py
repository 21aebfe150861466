"""T-LoRA and rank dropout: which ranks a sample trains, and that a batch of several noise levels trains each sample's own."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from stages.models import adapters
from stages.text_to_image.train.config import NoiseConfig, PreservationConfig, TLoraConfig
from stages.tuner.adapters import lora
from stages.tuner.adapters.masks import RankMasks, active_ranks
from stages.tuner.adapters.targets import Target, fresh_adapter, select_targets
from stages.tuner.memory import MemoryPlan
from tests.stages.text_to_image.train.runs import BASE, TINY, Run, rich_tables, tables
from tests.stages.text_to_image.train.test_step import SPLIT, distance, step_of
from tests.stages.tuner.adapters.variants import normal
from tests.stages.tuner.blockwise.test_backprop import assert_same

RANK = 4
LEVELS = NoiseConfig(base="uniform", shift="none")
TLORA = replace(BASE, rank=RANK, batch_size=3, tlora=TLoraConfig(1, "zero"), noise=LEVELS, caption_dropout=0.0)


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


@pytest.mark.parametrize("masked", [False, True])
def test_an_orthogonal_start_gives_the_output_and_the_gradients_of_the_authors_code(masked):
    torch = pytest.importorskip("torch")
    (target,) = select_targets({"q": (48, 32)}, ["*"], RANK, orthogonal=True)
    start = fresh_adapter([target], 3)
    frozen = {name: np.array(value) for name, value in start.items()}
    arrays = {
        name: value if name.endswith(lora.START) else value + 0.1 * normal(n, *value.shape)
        for n, (name, value) in enumerate(start.items())
    }
    trained = [name for name in arrays if not name.endswith(lora.START)]
    weight, x, dy = normal(5, 48, 32), normal(6, 3, 7, 32), normal(7, 3, 7, 48)
    mask_BR = (np.arange(RANK) < np.array([[1], [3], [4]])).astype(np.float32)

    def run(x, *values):
        own = arrays | dict(zip(trained, values, strict=True))
        return lora.AdaptedLinear(own, {"q": mx.array(mask_BR) if masked else target.scale})("q", weight, x)

    (y,), (dx, *grads) = mx.vjp(run, [x, *(arrays[name] for name in trained)], [dy])

    # OrthogonalLoRALinearLayer of the authors: q and p are Linears, lambda a row; of each a frozen copy is subtracted.
    q, p, row = (torch.tensor(np.array(arrays["q" + end]), requires_grad=True) for end in (lora.Q, lora.P, lora.LAMBDA))
    q0, row0 = (torch.tensor(frozen["q" + end]) for end in (lora.Q, lora.LAMBDA))
    p0 = torch.tensor(frozen["q" + lora.P])
    there, mask = torch.tensor(np.array(x), requires_grad=True), torch.tensor(mask_BR)[:, None] if masked else 1.0
    linear = torch.nn.functional.linear
    adapted = linear(linear(there, q) * row[None] * mask, p) - linear(linear(there, q0) * row0[None] * mask, p0)
    out = linear(there, torch.tensor(np.array(weight))) + adapted
    out.backward(torch.tensor(np.array(dy)))
    wanted = {"x": there.grad, "q" + lora.Q: q.grad, "q" + lora.P: p.grad, "q" + lora.LAMBDA: row.grad}
    np.testing.assert_allclose(np.array(y), out.detach().numpy(), rtol=1e-5, atol=1e-5)
    for name, grad in zip(["x", *trained], [dx, *grads], strict=True):
        assert wanted[name].abs().max() > 0.1
        np.testing.assert_allclose(np.array(grad), wanted[name].numpy(), rtol=1e-5, atol=2e-5, err_msg=name)
    stored = lora.as_stored(arrays)
    assert {name: value.shape for name, value in stored.items()} == {"q" + lora.A: (8, 32), "q" + lora.B: (48, 8)}
    if not masked:
        np.testing.assert_allclose(np.array(lora.AdaptedLinear(stored, {"q": 1.0})("q", weight, x)), np.array(y), atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_an_orthogonal_start_changes_no_bit_and_has_the_last_singular_values_of_a_gaussian_matrix(dtype):
    for shape in ((96, 96), (160, 64)):
        (target,) = select_targets({"q": shape}, ["*"], 8, orthogonal=True)
        start = fresh_adapter([target], 0)
        weight, x = normal(5, *shape).astype(dtype), normal(6, 3, shape[1]).astype(dtype)
        assert mx.array_equal(lora.AdaptedLinear(start, {"q": 1.0})("q", weight, x), lora.product(x, weight))
        assert lora.largest_change(start).item() == 0
        assert set(start) == {"q" + suffix for suffix in target.shapes}
        for basis in (np.array(start["q" + lora.Q]), np.array(start["q" + lora.P]).T):
            np.testing.assert_allclose(basis @ basis.T, np.eye(8), atol=1e-6)
        draw = np.random.default_rng(0)
        svd = [np.linalg.svd(draw.normal(0, 1 / 8, shape[::-1]), compute_uv=False)[-8:] for _ in range(50)]
        np.testing.assert_allclose(np.array(start["q" + lora.LAMBDA]), np.mean(svd, axis=0), rtol=0.05, atol=0.02)


def test_an_orthogonal_start_trains_what_the_plans_agree_on_and_keeps_its_copy(transformer, tmp_path):
    config = replace(TLORA, tlora=TLoraConfig(1), base_bits=4, steps=2)
    run = Run(tmp_path, transformer, config, tables(((64, 64),) * 4))
    training, batches = run.training(), run.micro_batches()
    training.step(batches, 0.1)
    before = training.frozen
    whole = training.gradient(batches)
    assert {name.rpartition(".")[2] for name in whole.grads} == {"ortho_q", "ortho_p", "ortho_lambda"}
    for plan in ("blocks", 2):
        training.memory = MemoryPlan(plan)
        assert_same(training.gradient(batches).grads, whole.grads, SPLIT)
    training.step(batches, 0.1)
    assert training.frozen is before
    run.go()
    arrays, scales = TINY.architecture.read_adapter(tmp_path / "artifacts/adapter.safetensors")
    assert scales == training.scales and adapters.variant(arrays) == "lora"
    assert set(adapters.ranks(arrays).values()) == {2 * RANK}


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

    targets = [Target(f"q{n}", 8, 8, 8, 8.0) for n in range(400)]
    masks = np.stack([np.array(mask) for mask in RankMasks(7, dropout=0.25)([One()], targets).values()])
    assert set(np.unique(masks)) == {0.0, np.float32(1 / 0.75)}
    assert masks.mean() == pytest.approx(1, abs=0.03)
    again = RankMasks(7, dropout=0.25)([One()], targets)
    assert all(np.array_equal(mask, again[f"q{n}"]) for n, mask in enumerate(masks))
