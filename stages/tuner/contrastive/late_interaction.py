"""Scores of late interaction and their losses: MaxSim, InfoNCE, margin, and XTR's training objective.

Token vectors have length 1 and are zero for padding. MaxSim: Khattab and Zaharia 2020, arXiv 2004.12832. XTR: Lee et al. 2023,
arXiv 2304.01982. B queries, N documents, Q tokens of a query, K tokens of a document, E width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from stages import kernels

HIDDEN = -1e9  # similarity of padding, before the maximum; a pad's zero would otherwise beat a true negative similarity
CHUNK_BYTES = 256 << 20  # of the similarities of some queries with all documents


def token_similarities(query_BQE: mx.array, document_NKE: mx.array, document_real_NK: mx.array) -> mx.array:
    """Return the dot product of every query token with every document token, shape `(B, Q, N, K)`. `query_BQE` holds B
    queries of Q token vectors. `document_NKE` holds N documents of K token vectors. `document_real_NK` is False for
    padding. The result is -1e9 there.
    """
    (B, Q, E), (N, K, _) = query_BQE.shape, document_NKE.shape
    flat = kernels.linear(query_BQE.reshape(B * Q, E), document_NKE.reshape(N * K, E))
    return mx.where(document_real_NK[None, None], flat.reshape(B, Q, N, K), HIDDEN)


def maxsim(
    query_BQE: mx.array, query_real_BQ: mx.array, document_NKE: mx.array, document_real_NK: mx.array, mean: bool = True
) -> mx.array:
    """Return the MaxSim score of every query with every document, shape `(B, N)`. `query_BQE` holds B queries of Q
    token vectors. `document_NKE` holds N documents of K token vectors. `query_real_BQ` and `document_real_NK` are False
    for padding. For each query token, the score adds the largest similarity with a document token. If `mean` is True,
    the sum is divided by the number of query tokens.

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
    """Return the number of tokens of each query, float32 of shape `(B, 1)`. `real_BQ` is a boolean array that is False
    for padding. A query without tokens gives 1.

    The result can therefore be used as a divisor.
    """
    return mx.maximum(real_BQ.sum(axis=1, keepdims=True), 1).astype(mx.float32)


def xtr_scores(
    query_BQE: mx.array, query_real_BQ: mx.array, document_NKE: mx.array, document_real_NK: mx.array, k: int
) -> mx.array:
    """Return the XTR training score of every query with every document, shape `(B, N)`. `query_BQE` holds B queries of
    Q token vectors. `document_NKE` holds N documents of K token vectors. `query_real_BQ` and `document_real_NK` are
    False for padding. First, each query token selects the `k` most similar tokens among the tokens of all N documents.
    To score a query with a document, each query token that selected a token of the document gives its largest
    similarity to the document's tokens. The score is the mean of these similarities.

    For example, a query has three tokens. Two of them selected tokens of a document, with the largest similarities 0.9
    and 0.7. The third selected only tokens of other documents and is ignored. The score is (0.9 + 0.7) / 2 = 0.8. If no
    query token selected a token of the document, the score is 0. Ties with the last of the `k` tokens are selected too.
    The choice of the selected tokens is constant for the gradient.
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
    """Return a boolean array `(B, N)` that is True where a document must not count as a negative of a query. `groups`
    holds the duplicate group of each of the B queries. `document_groups` holds the duplicate group of each of the N
    documents. Entry `(b, n)` is True if query `b` and document `n` have the same group. Entry `(b, b)` is always False,
    because document `b` is the positive of query `b`.
    """
    same_BN = mx.array(list(groups))[:, None] == mx.array(list(document_groups))[None]
    own_BN = mx.arange(len(groups))[:, None] == mx.arange(len(document_groups))[None]
    return same_BN & ~own_BN


def info_nce(scores_BN: mx.array, temperature: mx.array, same_BN: mx.array, symmetric: bool = False) -> mx.array:
    """Return the InfoNCE loss of each query, shape `(B,)`. `scores_BN` holds the score of each query with each document.
    Document `b` is the positive of query `b`. The scores are divided by `temperature`. Pairs that are True in `same_BN` are
    left out. If `symmetric` is false, the loss is the cross-entropy of choosing document `b` for query `b`. If it is true, this
    is averaged with the cross-entropy of choosing query `b` for document `b`.
    """
    logits_BN = mx.where(same_BN, HIDDEN, scores_BN / temperature)
    B = len(logits_BN)
    own_B = mx.diag(logits_BN[:, :B])
    loss_B = mx.logsumexp(logits_BN, axis=1) - own_B
    if not symmetric:
        return loss_B
    return (loss_B + mx.logsumexp(logits_BN[:, :B], axis=0) - own_B) / 2


def hardest(scores_BN: mx.array, same_BN: mx.array) -> mx.array:
    """Return `scores_BN` with only the scores of negatives kept, shape `(B, N)`. All other scores become -1e9. Document
    `b` is the positive of query `b`, so it is no negative. Pairs that are True in `same_BN` are no negatives either.
    """
    own_BN = mx.arange(scores_BN.shape[0])[:, None] == mx.arange(scores_BN.shape[1])[None]
    return mx.where(same_BN | own_BN, HIDDEN, scores_BN)


def margin_loss(scores_BN: mx.array, margin: mx.array, same_BN: mx.array) -> mx.array:
    """Return the margin loss of each query, shape `(B,)`. `scores_BN` holds the scores of B queries with N documents.
    Document `b` is the positive of query `b`. All other documents are its negatives, except pairs that are True in the
    boolean array `same_BN`. `margin` is a scalar: the least wanted lead of the positive. The loss is
    `max(0, margin - positive + negative)`. Here `positive` is the score of the positive, and `negative` is the highest
    score of a negative.
    """
    own_B = mx.diag(scores_BN[:, : len(scores_BN)])
    return mx.maximum(margin - own_B + hardest(scores_BN, same_BN).max(axis=1), 0.0)


def in_batch_rows(scores_BN: mx.array, same_BN: mx.array) -> dict[str, mx.array]:
    """Return how well each query of a batch finds its document, as a dict from table column to array `(B,)`. `scores_BN` holds
    the score of each query with each document. Document `b` is the positive of query `b`. The other documents are negatives,
    except pairs that are True in `same_BN`.

    The column "rank" is the rank of the positive, counted from 1; a tie counts against the positive. "score" is the score of
    the positive. "candidates" is the number of documents compared, including the positive. "hardest_id" is the index of the
    negative with the highest score, or -1 if there is none. "hardest_score" is the score of this negative, or NaN.
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
