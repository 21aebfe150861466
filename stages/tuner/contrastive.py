"""Contrastive training: MaxSim (Khattab and Zaharia 2020, arXiv 2004.12832), XTR (Lee et al. 2023, arXiv 2304.01982), their
losses, and GradCache (Gao et al. 2021, arXiv 2101.06983): the gradient of a loss over a whole batch in the memory of a part.

Token vectors have length 1 and are zero for padding, where the `real` masks are False. Document b is the positive of query b.
B queries, N documents, Q tokens of a query, K tokens of a document, E width of a vector.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from stages import kernels
from stages.tuner.adapters.lora import Scale
from stages.tuner.blockwise.backprop import Chain, Loss, Plan, Tree, Values, loss_and_grads, main_losses, predict
from stages.tuner.ranks import Ranks
from stages.tuner.weights import Arrays

HIDDEN = -1e9  # similarity of padding, before the maximum; a pad's zero would otherwise beat a true negative similarity
CHUNK_BYTES = 256 << 20  # of the similarities of some queries with all documents


def token_similarities(query_BQE: mx.array, document_NKE: mx.array, document_real_NK: mx.array) -> mx.array:
    """Dot product of every query token with every document token, (B, Q, N, K); HIDDEN for padding of documents."""
    (B, Q, E), (N, K, _) = query_BQE.shape, document_NKE.shape
    flat = kernels.linear(query_BQE.reshape(B * Q, E), document_NKE.reshape(N * K, E))
    return mx.where(document_real_NK[None, None], flat.reshape(B, Q, N, K), HIDDEN)


def maxsim(
    query_BQE: mx.array, query_real_BQ: mx.array, document_NKE: mx.array, document_real_NK: mx.array, mean: bool = True
) -> mx.array:
    """Score of every query with every document, (B, N): each query token's largest similarity, summed or averaged."""
    # At most CHUNK_BYTES of similarities at once in the forward pass.
    per_query = 4 * query_BQE.shape[1] * document_real_NK.size
    step = max(1, CHUNK_BYTES // per_query)
    parts = []
    for n in range(0, len(query_BQE), step):
        best_bQN = token_similarities(query_BQE[n : n + step], document_NKE, document_real_NK).max(axis=-1)
        parts.append(mx.where(query_real_BQ[n : n + step, :, None], best_bQN, 0.0).sum(axis=1))
    scores_BN = mx.concatenate(parts)
    return scores_BN / mx.maximum(query_real_BQ.sum(axis=1, keepdims=True), 1).astype(mx.float32) if mean else scores_BN


def xtr_scores(
    query_BQE: mx.array, query_real_BQ: mx.array, document_NKE: mx.array, document_real_NK: mx.array, k: int
) -> mx.array:
    """XTR's training score of every query with every document, (B, N); constant in which tokens are retrieved."""
    similarity_BQNK = token_similarities(query_BQE, document_NKE, document_real_NK)
    B, Q, N, K = similarity_BQNK.shape
    flat = mx.stop_gradient(similarity_BQNK).reshape(B, Q, N * K)
    # Each query token retrieves its k most similar tokens among those of all N documents, and any tied with the last.
    least_BQ = mx.topk(flat, min(k, N * K), axis=-1).min(axis=-1)
    retrieved = mx.stop_gradient(similarity_BQNK) >= mx.maximum(least_BQ, HIDDEN / 2)[:, :, None, None]
    retrieved = retrieved & query_real_BQ[:, :, None, None]
    best_BQN = mx.where(retrieved, similarity_BQNK, HIDDEN).max(axis=-1)
    found_BQN = retrieved.any(axis=-1)
    # The mean over the query tokens that retrieved a token of the document; 0 if none did.
    return mx.where(found_BQN, best_BQN, 0.0).sum(axis=1) / mx.maximum(found_BQN.sum(axis=1), 1)


def same_group(groups: Sequence[int], document_groups: Sequence[int]) -> mx.array:
    """True (B, N) where a duplicate of the positive must not count as a negative; False for the positive itself."""
    same_BN = mx.array(list(groups))[:, None] == mx.array(list(document_groups))[None]
    own_BN = mx.arange(len(groups))[:, None] == mx.arange(len(document_groups))[None]
    return same_BN & ~own_BN


def info_nce(scores_BN: mx.array, temperature: mx.array, same_BN: mx.array, symmetric: bool = False) -> mx.array:
    """Cross-entropy of choosing document b for query b, (B,). `symmetric`: averaged with choosing query b for document b."""
    logits_BN = mx.where(same_BN, HIDDEN, scores_BN / temperature)
    B = len(logits_BN)
    own_B = mx.diag(logits_BN[:, :B])
    loss_B = mx.logsumexp(logits_BN, axis=1) - own_B
    if not symmetric:
        return loss_B
    return (loss_B + mx.logsumexp(logits_BN[:, :B], axis=0) - own_B) / 2


def hardest(scores_BN: mx.array, same_BN: mx.array) -> mx.array:
    own_BN = mx.arange(scores_BN.shape[0])[:, None] == mx.arange(scores_BN.shape[1])[None]
    # HIDDEN where the document is no negative of the query.
    return mx.where(same_BN | own_BN, HIDDEN, scores_BN)


def margin_loss(scores_BN: mx.array, margin: mx.array, same_BN: mx.array) -> mx.array:
    """max(0, margin - positive + hardest negative), (B,)."""
    own_B = mx.diag(scores_BN[:, : len(scores_BN)])
    return mx.maximum(margin - own_B + hardest(scores_BN, same_BN).max(axis=1), 0.0)


def in_batch_rows(scores_BN: mx.array, same_BN: mx.array) -> dict[str, mx.array]:
    """How well each query finds its document in the batch, by table column, (B,)."""
    scores_BN = mx.stop_gradient(scores_BN)
    own_B = mx.diag(scores_BN[:, : len(scores_BN)])
    others_BN = hardest(scores_BN, same_BN)
    best_B = others_BN.max(axis=1)
    none_B = best_B <= HIDDEN / 2
    return {
        "rank": 1 + (others_BN >= own_B[:, None]).sum(axis=1).astype(mx.int32),  # a tie counts against the positive
        "candidates": 1 + (others_BN > HIDDEN / 2).sum(axis=1).astype(mx.int32),  # with the positive
        "hardest_id": mx.where(none_B, -1, others_BN.argmax(axis=1).astype(mx.int32)),
        "score": own_B,
        "hardest_score": mx.where(none_B, mx.nan, best_B),
    }


# GradCache: every part is encoded without a gradient, the loss of all vectors gives its gradient by each vector, and every part
# is encoded again to carry this gradient back through it: one more forward pass

Join = Callable[[list[Tree]], Tree]  # predictions of all parts, in order -> the prediction of the whole batch


def loss_and_grads_in_parts(
    chain: Chain,
    adapters: Arrays,
    scales: Mapping[str, Scale],
    parts: Sequence[Mapping[str, Any]],
    join: Join,
    loss: Loss,
    plan: Plan = "whole",
    ranks: Ranks | None = None,
) -> tuple[mx.array | Values, Arrays]:
    """`loss_and_grads` of a batch, part by part; with several `ranks`, the gradients of this rank's parts only."""
    ranks = ranks or Ranks()
    own = ranks.part(len(parts))
    encoded = []
    for part in parts[own]:
        encoded.append(predict(chain, adapters, scales, part))
        mx.eval(encoded[-1])
    predictions = _gathered(encoded, ranks)
    del encoded

    def mean_and_losses(predictions: list[Tree]) -> tuple[mx.array, mx.array | Values]:
        found = loss(join(predictions))
        return main_losses(found).mean(), found

    (_, losses_B), pulls = mx.value_and_grad(mean_and_losses)(predictions)
    mx.eval(losses_B, pulls)
    del predictions
    # The sum over parts, and then over ranks, is the gradient of the batch.
    total: Arrays = {}
    for part, pull in zip(parts[own], pulls[own], strict=True):
        # A loss whose gradient is `pull`. Keywords, so that it is compiled once and not for each pull.
        carried = functools.partial(_inner_product, **{f"pull_{name}": value for name, value in tree_flatten(pull)})
        _, grads = loss_and_grads(chain, adapters, scales, part, carried, plan)
        total = {
            name: total[name] + grad.astype(mx.float32) if total else grad.astype(mx.float32) for name, grad in grads.items()
        }
        del grads
        mx.eval(total)  # else the next part would begin before this part's activations are freed
    return losses_B, total


def _gathered(predictions: list[Tree], ranks: Ranks) -> list[Tree]:
    if ranks.size == 1:
        return predictions
    # Each rank has as many parts, in the order of the batch.
    by_rank: list[list[Tree]] = [[] for _ in range(ranks.size)]
    for prediction in predictions:
        names, leaves = zip(*tree_flatten(prediction), strict=True)
        found = ranks.gather(leaves)
        for rank, own in enumerate(by_rank):
            mine = found[rank * len(names) : (rank + 1) * len(names)]
            own.append(tree_unflatten(list(zip(names, mine, strict=True))))
    return [prediction for own in by_rank for prediction in own]


def _inner_product(prediction: Tree, **pulls: mx.array) -> mx.array:
    found = dict(tree_flatten(prediction))
    return mx.stack([(value.astype(mx.float32) * pulls[f"pull_{name}"]).sum() for name, value in found.items()]).sum()[None]
