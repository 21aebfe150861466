"""Scores and losses of late interaction against PyTorch: values and gradients by the token vectors."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.contrastive import late_interaction as late

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


def torch_maxsim(torch: Any, q: Any, d: Any, mean: bool) -> Any:
    scores = torch.einsum("bqe,nke->bqnk", q, d).masked_fill(~torch.tensor(DOCUMENT_REAL), -torch.inf).amax(-1)
    real = torch.tensor(QUERY_REAL)
    summed = (scores * real[:, :, None]).sum(1)
    return summed / real.sum(1, keepdim=True) if mean else summed


def torch_xtr(torch: Any, q: Any, d: Any) -> Any:
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


def torch_info_nce(torch: Any, scores: Any, symmetric: bool) -> Any:
    logits = (scores / 0.05).masked_fill(torch.tensor(SAME), -torch.inf)
    own = torch.arange(B)
    loss = torch.nn.functional.cross_entropy(logits, own, reduction="none")
    if symmetric:
        loss = (loss + torch.nn.functional.cross_entropy(logits[:, :B].T, own, reduction="none")) / 2
    return loss


def torch_margin(torch: Any, scores: Any) -> Any:
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
    import torch

    q, d = (torch.tensor(value.astype(np.float64), requires_grad=True) for value in (QUERIES, DOCUMENTS))
    scores = torch_xtr(torch, q, d) if form == "xtr" else torch_maxsim(torch, q, d, form == "mean")
    scale = 1 / 7 if form == "sum" else 1  # the sum form's temperature is longer by the length of a query
    theirs = torch_margin(torch, scores) if kind == "margin" else torch_info_nce(torch, scores * scale, kind == "symmetric")
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


def test_a_pad_never_beats_a_token_with_a_negative_similarity() -> None:
    query = mx.array([[[1.0, 0.0]]])
    document = mx.array([[[-1.0, 0.0], [0.0, 0.0]]])
    real = mx.array([[True, False]])
    assert late.maxsim(query, mx.array([[True]]), document, real).item() == -1


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
