"""GradCache on a T5 encoder: the gradient of the whole batch, in the memory of a part."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.models.t5.model import T5, T5Config
from stages.tuner.adapters import full, lora
from stages.tuner.adapters.initial import fresh_adapter
from stages.tuner.adapters.targets import select_targets, target_scales
from stages.tuner.blockwise.backprop import loss_and_grads
from stages.tuner.contrastive import late_interaction as late
from stages.tuner.contrastive.gradcache import loss_and_grads_in_parts

PAIRS, QUERY, DOCUMENT = 16, 6, 24
CONFIG = T5Config(vocab_size=80, d_model=64, d_kv=16, d_ff=96, num_layers=3, num_heads=4, gated=True, dimensions=32)


def encoder() -> T5:
    rng = np.random.default_rng(1)
    return T5(CONFIG, {n: mx.array(rng.normal(size=s) / s[-1] ** 0.5, mx.float32) for n, s in CONFIG.shapes().items()})


def adapter(model: T5) -> tuple[dict[str, mx.array], dict[str, float]]:
    targets = select_targets(model.linears(), ("*",), rank=4, alpha=8.0, whole=("head.linear",))
    assert [t.name for t in targets if full.DIFF in t.shapes] == ["head.linear"]
    rng = np.random.default_rng(2)
    arrays = fresh_adapter(targets, seed=3)
    filled = {
        n: mx.array(rng.normal(size=a.shape) / 20, mx.float32) if n.endswith(lora.ZERO_AT_START) else a for n, a in arrays.items()
    }
    return filled, target_scales(targets)


def batch(pairs: int, document: int = DOCUMENT) -> tuple[list[mx.array], list[mx.array]]:
    rng = np.random.default_rng(4)
    real = [np.arange(length)[None] < rng.integers(2, length + 1, pairs)[:, None] for length in (QUERY, document)]
    ids = [np.where(mask, rng.integers(2, 80, mask.shape), 0) for mask in real]
    return [mx.array(each) for each in ids], [mx.array(mask) for mask in real]


def contrast(vectors: list[mx.array], query_real: mx.array, document_real: mx.array) -> dict[str, mx.array]:
    scores_BN = late.maxsim(vectors[0], query_real, vectors[1], document_real)
    same_BN = mx.zeros(scores_BN.shape, mx.bool_)
    return {"loss": late.info_nce(scores_BN, mx.array(0.5), same_BN), **late.in_batch_rows(scores_BN, same_BN)}


def joined(parts: list[list[mx.array]]) -> list[mx.array]:
    return [mx.concatenate(each) for each in zip(*parts, strict=True)]


def gradients(model: T5, pairs: int, size: int | None, document: int = DOCUMENT, plan: Any = "whole") -> tuple[Any, Any]:
    ids, real = batch(pairs, document)
    arrays, scales = adapter(model)
    loss = functools.partial(contrast, query_real=real[0], document_real=real[1])
    if size is None:
        return loss_and_grads(model, arrays, scales, {"ids": ids, "real": real}, loss, plan)
    parts = [{"ids": [x[n : n + size] for x in ids], "real": [x[n : n + size] for x in real]} for n in range(0, pairs, size)]
    return loss_and_grads_in_parts(model, arrays, scales, parts, joined, loss, plan)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 16])
def test_a_batch_in_parts_has_the_loss_and_the_gradient_of_the_whole_batch(size: int) -> None:
    model = encoder()
    whole, wanted = gradients(model, PAIRS, None)
    found, grads = gradients(model, PAIRS, size)
    assert np.abs(np.array(found["loss"]) - np.array(whole["loss"])).max() <= 1e-5 * np.abs(np.array(whole["loss"])).max()
    assert found["rank"].tolist() == whole["rank"].tolist()
    assert set(grads) == set(wanted)
    largest = max(mx.abs(value).max().item() for value in wanted.values())
    apart = max(mx.abs(grads[name] - wanted[name]).max().item() for name in wanted)
    assert apart <= 1e-7, (apart, largest)
    assert largest >= 1e-2, "the gradient is far above the limit"


def test_every_plan_gives_the_gradient_of_the_whole_graph() -> None:
    model = encoder()
    _, wanted = gradients(model, PAIRS, None)
    for size in (None, 4):
        _, grads = gradients(model, PAIRS, size, plan="blocks")
        assert all(np.allclose(grads[name], wanted[name], atol=1e-6) for name in wanted)


def test_accumulating_the_losses_of_parts_alone_is_not_the_gradient_of_the_batch() -> None:
    model = encoder()
    _, wanted = gradients(model, PAIRS, None)
    arrays, scales = adapter(model)
    ids, real = batch(PAIRS)
    sums = dict.fromkeys(wanted, mx.array(0.0))
    for n in range(0, PAIRS, 4):
        own = [x[n : n + 4] for x in real]
        loss = functools.partial(contrast, query_real=own[0], document_real=own[1])
        _, grads = loss_and_grads(model, arrays, scales, {"ids": [x[n : n + 4] for x in ids], "real": own}, loss)
        sums = {name: sums[name] + grads[name] / 4 for name in grads}
    a, b = (np.concatenate([np.array(each[name]).ravel() for name in sorted(wanted)]) for each in (wanted, sums))
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) < 0.99


def test_four_parts_take_at_most_half_of_the_memory() -> None:
    model = encoder()

    def peak(size: int | None) -> int:
        mx.eval([block.weights for block in model.blocks])
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(gradients(model, 16, size, document=96))
        return mx.get_peak_memory() - before

    assert peak(4) <= peak(None) / 2
