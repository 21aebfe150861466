"""Scores of late interaction and their losses: MaxSim, InfoNCE, margin, and XTR's training objective.

Token vectors have length 1 and are zero for padding. MaxSim: Khattab and Zaharia 2020, arXiv 2004.12832. XTR: Lee et al. 2023,
arXiv 2304.01982. B queries, N documents, Q tokens of a query, K tokens of a document, E width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

HIDDEN = -1e9  # similarity of padding, before the maximum; a pad's zero would otherwise beat a true negative similarity
CHUNK_BYTES = 256 << 20  # of the similarities of some queries with all documents


def token_similarities(query_BQE: mx.array, document_NKE: mx.array, document_real_NK: mx.array) -> mx.array:
    """Return the similarity of every query token with every document token, (B, Q, N, K). Padding of documents has -1e9."""
    (B, Q, E), (N, K, _) = query_BQE.shape, document_NKE.shape
    flat = query_BQE.reshape(B * Q, E) @ document_NKE.reshape(N * K, E).T
    return mx.where(document_real_NK[None, None], flat.reshape(B, Q, N, K), HIDDEN)


def maxsim(
    query_BQE: mx.array, query_real_BQ: mx.array, document_NKE: mx.array, document_real_NK: mx.array, mean: bool = True
) -> mx.array:
    """Return the MaxSim score of every query with every document, (B, N). For each token of the query, the score adds the
    largest similarity with a token of the document. If `mean` is true, the sum is divided by the number of the query's tokens.
    `query_real_BQ` and `document_real_NK` are False for padding.

    Queries are computed in chunks, so that their similarities take at most 256 MiB at once in the forward pass.
    """
    per_query = 4 * query_BQE.shape[1] * document_real_NK.size
    step = max(1, CHUNK_BYTES // per_query)
    scores_BN = mx.concatenate(
        [
            _summed_maxima(query_BQE[n : n + step], query_real_BQ[n : n + step], document_NKE, document_real_NK)
            for n in range(0, len(query_BQE), step)
        ]
    )
    return scores_BN / _lengths(query_real_BQ) if mean else scores_BN


def _summed_maxima(query_BQE: mx.array, query_real_BQ: mx.array, document_NKE: mx.array, document_real_NK: mx.array) -> mx.array:
    best_BQN = token_similarities(query_BQE, document_NKE, document_real_NK).max(axis=-1)
    return mx.where(query_real_BQ[:, :, None], best_BQN, 0.0).sum(axis=1)


def _lengths(real_BQ: mx.array) -> mx.array:
    """Return the number of real tokens of each query as (B, 1), at least 1."""
    return mx.maximum(real_BQ.sum(axis=1, keepdims=True), 1).astype(mx.float32)


def xtr_scores(
    query_BQE: mx.array, query_real_BQ: mx.array, document_NKE: mx.array, document_real_NK: mx.array, k: int
) -> mx.array:
    """Return the scores of XTR's training objective, (B, N). Each query token retrieves its `k` most similar tokens among all
    document tokens of the batch. A document's score is the mean, over the query tokens that retrieved a token of it, of the
    largest retrieved similarity. It is 0 for a document of which no token was retrieved. Which tokens are retrieved is constant
    for the gradient. Tokens with the similarity of the k-th token are retrieved too.
    """
    similarity_BQNK = token_similarities(query_BQE, document_NKE, document_real_NK)
    B, Q, N, K = similarity_BQNK.shape
    flat = mx.stop_gradient(similarity_BQNK).reshape(B, Q, N * K)
    least_BQ = mx.topk(flat, min(k, N * K), axis=-1).min(axis=-1)
    retrieved = mx.stop_gradient(similarity_BQNK) >= mx.maximum(least_BQ, HIDDEN / 2)[:, :, None, None]
    retrieved = retrieved & query_real_BQ[:, :, None, None]
    best_BQN = mx.where(retrieved, similarity_BQNK, HIDDEN).max(axis=-1)
    found_BQN = retrieved.any(axis=-1)
    return mx.where(found_BQN, best_BQN, 0.0).sum(axis=1) / mx.maximum(found_BQN.sum(axis=1), 1)


def same_group(groups: Sequence[int], document_groups: Sequence[int]) -> mx.array:
    """Return which documents must not count as negatives of which query, a boolean array (B, N). `groups` holds the duplicate
    group of each query, and `document_groups` that of each document. Document b is the own document of query b. It is False
    there.
    """
    same_BN = mx.array(list(groups))[:, None] == mx.array(list(document_groups))[None]
    own_BN = mx.arange(len(groups))[:, None] == mx.arange(len(document_groups))[None]
    return same_BN & ~own_BN


def info_nce(scores_BN: mx.array, temperature: mx.array, same_BN: mx.array, symmetric: bool = False) -> mx.array:
    """Return the cross-entropy of every query: -log of the softmax of its scores over the documents, at its own document. The
    own document of query b is document b. `temperature` divides the scores. Documents in `same_BN` are left out. If `symmetric`
    is true, the result is the mean of this and of the cross-entropy of the own document over the queries.
    """
    logits_BN = mx.where(same_BN, HIDDEN, scores_BN / temperature)
    B = len(logits_BN)
    own_B = mx.diag(logits_BN[:, :B])
    loss_B = mx.logsumexp(logits_BN, axis=1) - own_B
    if not symmetric:
        return loss_B
    return (loss_B + mx.logsumexp(logits_BN[:, :B], axis=0) - own_B) / 2


def hardest(scores_BN: mx.array, same_BN: mx.array) -> mx.array:
    """Return the scores (B, N) with the own document of each query and the documents in `same_BN` set to -1e9."""
    own_BN = mx.arange(scores_BN.shape[0])[:, None] == mx.arange(scores_BN.shape[1])[None]
    return mx.where(same_BN | own_BN, HIDDEN, scores_BN)


def margin_loss(scores_BN: mx.array, margin: mx.array, same_BN: mx.array) -> mx.array:
    """Return how far each query's hardest negative comes within `margin` of its own document: max(0, margin - own + hardest)."""
    own_B = mx.diag(scores_BN[:, : len(scores_BN)])
    return mx.maximum(margin - own_B + hardest(scores_BN, same_BN).max(axis=1), 0.0)


def in_batch_rows(scores_BN: mx.array, same_BN: mx.array) -> dict[str, mx.array]:
    """Return what is stored of each query, by column. `rank` is the rank of its own document, from 1; a tie counts against it.
    `candidates` is the number of documents that it was compared with. `hardest_id` is the index of the best other document, or
    -1 if there is none. `score` and `hardest_score` are the scores of these two documents.
    """
    scores_BN = mx.stop_gradient(scores_BN)
    own_B = mx.diag(scores_BN[:, : len(scores_BN)])
    others_BN = hardest(scores_BN, same_BN)
    best_B = others_BN.max(axis=1)
    none_B = best_B <= HIDDEN / 2
    return {
        "rank": 1 + (others_BN >= own_B[:, None]).sum(axis=1).astype(mx.int32),
        "candidates": 1 + (others_BN > HIDDEN / 2).sum(axis=1).astype(mx.int32),
        "hardest_id": mx.where(none_B, -1, others_BN.argmax(axis=1).astype(mx.int32)),
        "score": own_B,
        "hardest_score": mx.where(none_B, mx.nan, best_B),
    }
