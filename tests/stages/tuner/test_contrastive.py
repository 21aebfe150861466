"""Scores and losses of late interaction against PyTorch: values and gradients by the token vectors."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.models.t5 import model as module
from stages.models.t5.model import HEAD, T5
from stages.tuner import contrastive as late
from stages.tuner.adapters import lora
from stages.tuner.adapters.targets import fresh_adapter, select_targets, target_scales
from stages.tuner.blockwise.backprop import loss_and_grads
from stages.tuner.contrastive import loss_and_grads_in_parts
from tests.stages.models.t5.test_encoder import ours, reference, texts
from tests.stages.tuner.blockwise.test_backprop import filled

B, N, Q, K, E, TOP = 6, 9, 7, 11, 16, 40
MOST = 1e-6


def vectors(rows: int, tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors, zero for padding, and which tokens are real; every row has another length."""
    rng = np.random.default_rng(seed)
    real = np.arange(tokens)[None] < rng.integers(1, tokens + 1, rows)[:, None]
    found = rng.normal(size=(rows, tokens, E))
    found /= np.linalg.norm(found, axis=-1, keepdims=True)
    return (found * real[:, :, None]).astype(np.float32), real


QUERIES, QUERY_REAL = vectors(B, Q, 1)
DOCUMENTS, DOCUMENT_REAL = vectors(N, K, 2)
SAME = np.zeros((B, N), bool)
SAME[0, 3] = SAME[2, 7] = True


def torch_maxsim(q: Any, q_real: np.ndarray, d: Any, d_real: np.ndarray, mean: bool) -> Any:
    scores = torch.einsum("bqe,nke->bqnk", q, d).masked_fill(~torch.tensor(d_real), -torch.inf).amax(-1)
    real = torch.tensor(q_real)
    summed = (scores * real[:, :, None]).sum(1)
    return summed / real.sum(1, keepdim=True) if mean else summed


def torch_xtr(q: Any, d: Any) -> Any:
    """As the paper has it: alignment by the k largest of all document tokens; Z counts the tokens that retrieved the document."""
    scores = torch.einsum("bqe,nke->bqnk", q, d).masked_fill(~torch.tensor(DOCUMENT_REAL), -torch.inf)
    rows = []
    for b in range(B):
        total, count = torch.zeros(N), torch.zeros(N)
        for i in np.flatnonzero(QUERY_REAL[b]):
            flat = scores[b, i].flatten()
            chosen = torch.zeros(N * K, dtype=torch.bool)
            chosen[flat.topk(TOP).indices] = True
            chosen &= flat > -torch.inf
            chosen = chosen.reshape(N, K)
            best = scores[b, i].masked_fill(~chosen, -torch.inf).amax(-1)
            total = total + torch.where(chosen.any(-1), best, 0.0)
            count = count + chosen.any(-1)
        rows.append(total / count.clamp(min=1))
    return torch.stack(rows)


def torch_info_nce(scores: Any, symmetric: bool) -> Any:
    logits = (scores / 0.05).masked_fill(torch.tensor(SAME), -torch.inf)
    own = torch.arange(B)
    loss = torch.nn.functional.cross_entropy(logits, own, reduction="none")
    if symmetric:
        loss = (loss + torch.nn.functional.cross_entropy(logits[:, :B].T, own, reduction="none")) / 2
    return loss


def torch_margin(scores: Any) -> Any:
    others = scores.masked_fill(torch.tensor(SAME) | torch.eye(B, N, dtype=torch.bool), -torch.inf)
    return torch.relu(0.2 - scores.diagonal() + others.amax(1))


def scores_of(form: str, q: mx.array, d: mx.array) -> mx.array:
    real = mx.array(QUERY_REAL), mx.array(DOCUMENT_REAL)
    return late.xtr_scores(q, real[0], d, real[1], TOP) if form == "xtr" else late.maxsim(q, real[0], d, real[1], form == "mean")


def loss_of(kind: str, scores_BN: mx.array) -> mx.array:
    same_BN = mx.array(SAME)
    if kind == "margin":
        return late.margin_loss(scores_BN, mx.array(0.2), same_BN)
    return late.info_nce(scores_BN, mx.array(0.05), same_BN, kind == "symmetric")


@pytest.mark.parametrize("kind", ["one way", "symmetric", "margin"])
@pytest.mark.parametrize("form", ["mean", "sum", "xtr"])
def test_losses_and_their_gradients_are_those_of_pytorch(form: str, kind: str) -> None:
    q, d = (torch.tensor(value.astype(np.float64), requires_grad=True) for value in (QUERIES, DOCUMENTS))
    scores = torch_xtr(q, d) if form == "xtr" else torch_maxsim(q, QUERY_REAL, d, DOCUMENT_REAL, form == "mean")
    scale = 1 / 7 if form == "sum" else 1  # the sum form's temperature is longer by the length of a query
    theirs = torch_margin(scores) if kind == "margin" else torch_info_nce(scores * scale, kind == "symmetric")
    theirs.mean().backward()

    def run(q: mx.array, d: mx.array) -> tuple[mx.array, mx.array]:
        found = scores_of(form, q, d)
        losses_B = loss_of(kind, found if kind == "margin" else found * scale)
        return losses_B.mean(), losses_B

    (_, ours), grads = mx.value_and_grad(run, argnums=(0, 1))(mx.array(QUERIES), mx.array(DOCUMENTS))
    assert np.abs(np.array(ours) - theirs.detach().numpy()).max() <= MOST * max(1, theirs.abs().max().item())
    real = QUERY_REAL[:, :, None], DOCUMENT_REAL[:, :, None]
    for own, other, kept in zip(grads, (q, d), real, strict=True):
        assert np.abs((np.array(own) - other.grad.numpy()) * kept).max() <= MOST
        assert np.abs(other.grad.numpy()).max() > 1e-3, "the gradient is worth comparing"


def test_documents_of_the_same_group_are_no_negatives_but_the_own_document_stays() -> None:
    same = late.same_group([5, 6, 5], [5, 6, 5, 6, 7])
    assert same.tolist() == [[False, False, True, False, False], [False, False, False, True, False], [True, *[False] * 4]]
    scores = mx.array([[0.1, 0.0, 0.9, 0.2, 0.3], [0.0, 0.4, 0.1, 0.9, 0.1], [0.8, 0.1, 0.2, 0.1, 0.2]])
    rows = late.in_batch_rows(scores, same)
    assert rows["rank"].tolist() == [3, 1, 2], "a tie counts against the own document"
    assert rows["candidates"].tolist() == [4, 4, 4]
    assert rows["hardest_id"].tolist() == [4, 2, 4]
    alone = late.in_batch_rows(mx.array([[0.5]]), mx.array([[False]]))
    assert (alone["rank"].item(), alone["hardest_id"].item(), np.isnan(alone["hardest_score"].item())) == (1, -1, True)


def test_scores_do_not_depend_on_the_size_of_a_chunk_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.array(scores_of("mean", mx.array(QUERIES), mx.array(DOCUMENTS)))
    monkeypatch.setattr(late, "CHUNK_BYTES", 4 * Q * N * K * 2)
    chunked = np.array(scores_of("mean", mx.array(QUERIES), mx.array(DOCUMENTS)))
    assert np.abs(whole - chunked).max() <= 1e-6


PAIRS, QUERY, DOCUMENT = 16, 6, 24


def adapter(model: T5) -> tuple[dict[str, mx.array], dict[str, float]]:
    targets = select_targets(model.linears(), ("*",), rank=4, alpha=8.0, whole=("head.linear",))
    assert [t.name for t in targets if lora.DIFF in t.shapes] == ["head.linear"]
    return filled(fresh_adapter(targets, seed=3), 0.04), target_scales(targets)


def batch(pairs: int, document: int = DOCUMENT) -> tuple[list[mx.array], list[mx.array]]:
    parts = [texts(99, pairs, length, seed=length) for length in (QUERY, document)]
    return [mx.array(ids) for ids, _ in parts], [mx.array(real) for _, real in parts]


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


@pytest.mark.parametrize(("size", "plan"), [(1, "whole"), (5, "whole"), (16, "whole"), (4, "blocks"), (None, "blocks")])
def test_a_batch_in_parts_has_the_loss_and_the_gradient_of_the_whole_batch_by_any_plan(size: int | None, plan: str) -> None:
    model = ours(*reference("gated"))
    whole, wanted = gradients(model, PAIRS, None)
    found, grads = gradients(model, PAIRS, size, plan=plan)
    assert np.abs(np.array(found["loss"]) - np.array(whole["loss"])).max() <= 1e-5 * np.abs(np.array(whole["loss"])).max()
    assert found["rank"].tolist() == whole["rank"].tolist()
    assert set(grads) == set(wanted)
    largest = max(mx.abs(value).max().item() for value in wanted.values())
    apart = max(mx.abs(grads[name] - wanted[name]).max().item() for name in wanted)
    assert apart <= 1e-7, (apart, largest)
    assert largest >= 1e-2, "the gradient is far above the limit"


def test_four_parts_take_at_most_half_of_the_memory() -> None:
    model = ours(*reference("gated"))

    def peak(size: int | None) -> int:
        mx.eval([block.weights for block in model.blocks])
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(gradients(model, 16, size, document=96))
        return mx.get_peak_memory() - before

    assert peak(4) <= peak(None) / 2


def torch_gradients(
    model: Any, head: np.ndarray, arrays: dict[str, mx.array], scales: dict[str, float], batch: list[Any]
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and its gradients in PyTorch: the adapter's arrays are added to the weights of transformers' own modules."""
    from torch.func import functional_call

    own = {name: torch.tensor(np.array(value), requires_grad=True) for name, value in arrays.items()}
    base, weights = model.state_dict(), {}
    for name in {name.removesuffix(lora.A) for name in own if name.endswith(lora.A)}:
        weights[f"{name}.weight"] = base[f"{name}.weight"] + scales[name] * own[name + lora.B] @ own[name + lora.A]
    projection = torch.tensor(head) + own["head.linear" + lora.DIFF]
    vectors = []
    for ids, real in batch:
        kwargs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(real).long()}
        states = functional_call(model, weights, (), kwargs).last_hidden_state
        vectors.append(torch.nn.functional.normalize(states @ projection.T, dim=-1))
    (q, d), (q_real, d_real) = vectors, (real for _, real in batch)
    scores = torch_maxsim(q, q_real, d, d_real, mean=True)
    loss = torch.nn.functional.cross_entropy(scores / 0.5, torch.arange(len(scores)))
    loss.backward()
    return loss.item(), {name: value.grad.numpy() for name, value in own.items()}


@pytest.mark.parametrize(("form", "attention"), [("gated", "kept"), ("gated", "fused"), ("relu", "computed again")])
def test_the_loss_and_every_gradient_are_those_of_pytorch(form: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "slow_exp", lambda scores: attention == "kept")
    monkeypatch.setattr(module, "fused_gradient", lambda queries: attention == "fused")
    model, head = reference(form)
    encoder = ours(model, head)
    assert HEAD not in model.state_dict()
    arrays, scales = adapter(encoder)
    assert len(scales) == 3 * (7 if form == "gated" else 6) + 1
    batch = [texts(99, 6, 9, seed=1), texts(99, 6, 128 if attention == "fused" else 30, seed=2)]
    inputs = {"ids": [mx.array(ids) for ids, _ in batch], "real": [mx.array(real) for _, real in batch]}
    loss = functools.partial(contrast, query_real=inputs["real"][0], document_real=inputs["real"][1])
    found, grads = loss_and_grads(encoder, arrays, scales, inputs, loss)
    wanted_loss, wanted = torch_gradients(model, head, arrays, scales, batch)
    assert found["loss"].mean().item() == pytest.approx(wanted_loss, rel=1e-5)
    assert set(grads) == set(wanted)
    for name, value in wanted.items():
        assert np.abs(value).max() > 0, f"no gradient reaches {name}"
        assert np.linalg.norm(np.array(grads[name]) - value) <= 1e-4 * np.linalg.norm(value), name
