"""The loss of a batch of pairs: MaxSim or XTR scores of every query with every document, and InfoNCE over them.

B pairs, M documents of a pair, N = B M documents, Q tokens of a query, K tokens of a document, E width of a vector.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from stages.models.t5.model import T5
from stages.retrieval.train.config import LossConfig
from stages.retrieval.train.data import PairBatch
from stages.tuner import contrastive as late
from stages.tuner.task import Division, Term

Vectors = list[mx.array]  # of the queries (B, Q, E), and of the documents (B M, K, E), pair by pair


@dataclass(frozen=True)
class Contrast:
    loss: LossConfig
    separable: bool = False  # a pair's loss depends on its batch: parts of a large batch go through GradCache

    def terms(self, model: T5, batch: PairBatch) -> Iterator[Term]:
        c = self.loss
        numbers = {"temperature": mx.array(c.temperature), "margin": mx.array(c.margin)}
        numbers["margin_weight"] = mx.array(c.margin_weight)
        function = training_loss(c.kind, c.form == "mean", c.symmetric, c.top_k, c.margin_weight > 0)
        yield _term(batch, functools.partial(function, **_arrays(batch), **numbers))

    def validation_term(self, model: T5, batch: PairBatch) -> Term:
        """1 - 1 / rank of each query's own document, by MaxSim."""
        return _term(batch, functools.partial(ranking_loss, **_arrays(batch)))


def _term(batch: PairBatch, loss: Callable[..., dict[str, mx.array]]) -> Term:
    names = [str(text) for text in batch.texts_BM.T.ravel()]
    return Term(_inputs(batch), loss, names={"hardest_id": names}, division=Division(functools.partial(_parts, batch), _join))


def _inputs(batch: PairBatch) -> dict[str, Any]:
    """Queries and documents: ids and masks of (texts, tokens)."""
    K = batch.document_BMK.shape[-1]
    ids = [mx.array(batch.query_BQ), mx.array(batch.document_BMK.reshape(-1, K))]
    real = [mx.array(batch.query_real_BQ), mx.array(batch.document_real_BMK.reshape(-1, K))]
    return {"ids": ids, "real": real}


def _parts(batch: PairBatch, samples: int) -> list[dict[str, Any]]:
    # Parts are encoded apart, not compared apart: the gradient of 4 batches of 4 has only a cosine of 0.85 with that of one
    # of 16.
    count = len(batch.samples)
    return [_inputs(batch.select(start, min(start + samples, count))) for start in range(0, count, samples)]


def _join(parts: Sequence[Vectors]) -> Vectors:
    return [mx.concatenate(list(each)) for each in zip(*parts, strict=True)]


def _arrays(batch: PairBatch) -> dict[str, Any]:
    """Masks: `query_real` and `document_real` (texts, tokens); `same` (queries, documents), True where it is no negative."""
    K = batch.document_BMK.shape[-1]
    real_NK = batch.document_real_BMK.swapaxes(0, 1).reshape(-1, K)
    same_BN = late.same_group(batch.groups_B.tolist(), batch.document_groups_BM.T.ravel().tolist())
    empty_N = ~mx.any(mx.array(real_NK), axis=1)  # stands for a hard negative that a pair does not have
    return {"query_real": mx.array(batch.query_real_BQ), "document_real": mx.array(real_NK), "same": same_BN | empty_N[None]}


def _own_first(document_NKE: mx.array, pairs: int) -> mx.array:
    """(own 1, negative 1, own 2, negative 2) becomes (own 1, own 2, negative 1, negative 2): (documents, tokens, width)."""
    N, K, E = document_NKE.shape
    return document_NKE.reshape(pairs, N // pairs, K, E).swapaxes(0, 1).reshape(N, K, E)


# Equal arguments give one function object, which is compiled only once.
@functools.cache
def training_loss(kind: str, mean: bool, symmetric: bool, top_k: int, with_margin: bool) -> Callable[..., dict[str, mx.array]]:
    """A function of the vectors, the masks of `_arrays` and three scalars, which returns "loss" and statistics per query.

    InfoNCE over MaxSim or XTR scores: in XTR a query token counts, also in the mean, only where it selects a token of the
    document among its `top_k` of the batch. The margin loss is 0 once the own document is `margin` above every negative.
    """

    def loss(
        vectors: Vectors,
        query_real: mx.array,
        document_real: mx.array,
        same: mx.array,
        temperature: mx.array,
        margin: mx.array,
        margin_weight: mx.array,
    ) -> dict[str, mx.array]:
        query_BQE, document_NKE = vectors[0], _own_first(vectors[1], len(vectors[0]))
        if kind == "xtr":
            scores_BN = late.xtr_scores(query_BQE, query_real, document_NKE, document_real, top_k)
        else:
            scores_BN = late.maxsim(query_BQE, query_real, document_NKE, document_real, mean)
        loss_B = late.info_nce(scores_BN, temperature, same, symmetric)
        if with_margin:
            loss_B = loss_B + margin_weight * late.margin_loss(scores_BN, margin, same)
        return {"loss": loss_B, **late.in_batch_rows(scores_BN, same)}

    return loss


def ranking_loss(vectors: Vectors, query_real: mx.array, document_real: mx.array, same: mx.array) -> dict[str, mx.array]:
    """The "loss" is 1 - 1 / rank by MaxSim, beside the statistics of `late_interaction.in_batch_rows`, (queries,) each."""
    scores_BN = late.maxsim(vectors[0], query_real, _own_first(vectors[1], len(vectors[0])), document_real)
    rows = late.in_batch_rows(scores_BN, same)
    return {"loss": 1 - 1 / rows["rank"].astype(mx.float32), **rows}


def zero_inputs(samples: int, documents: int, query: int, document: int) -> dict[str, Any]:
    shapes = (samples, query), (samples * documents, document)
    return {"ids": [mx.zeros(s, mx.int32) for s in shapes], "real": [mx.ones(s, mx.bool_) for s in shapes]}
