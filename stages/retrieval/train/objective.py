"""The loss of a batch of pairs: MaxSim or XTR scores of every query with every document, and InfoNCE over them.

B pairs, M documents of a pair, N = B M documents, Q tokens of a query, K tokens of a document, E width of a vector.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from stages.models.t5.encoder import T5
from stages.retrieval.train.config import LossConfig
from stages.retrieval.train.reader import PairBatch
from stages.tuner.contrastive import late_interaction as late
from stages.tuner.task import Division, Term

Vectors = list[mx.array]  # of the queries (B, Q, E), and of the documents (B M, K, E), pair by pair


@dataclass(frozen=True)
class Contrast:
    """The contrastive objective: it compares every query of a batch with every document of the batch. `loss` holds the
    settings [train.loss]. `separable` is False. This tells the training step that the loss of a pair depends on the
    other pairs of its batch.

    A large batch is therefore computed in parts with GradCache, which gives the gradients of the whole batch.
    """

    loss: LossConfig
    separable: bool = False

    def terms(self, model: T5, batch: PairBatch) -> Iterator[Term]:
        """Yield the single loss term of a batch, as a `Term`: a loss function and its inputs. The function returns, for
        each query, the loss and statistics such as the rank of its own document. `model` is not used.
        """
        c = self.loss
        numbers = {"temperature": mx.array(c.temperature), "margin": mx.array(c.margin)}
        numbers["margin_weight"] = mx.array(c.margin_weight)
        function = training_loss(c.kind, c.form == "mean", c.symmetric, c.top_k, c.margin_weight > 0)
        yield _term(batch, functools.partial(function, **_arrays(batch), **numbers))

    def validation_term(self, model: T5, batch: PairBatch) -> Term:
        """Return the validation loss of a batch of held-out pairs, as a `Term`: a loss function and its inputs. The
        loss of a query is 1 minus the reciprocal rank of its own document. Documents are ranked by their MaxSim score.
        `model` is not used.
        """
        return _term(batch, functools.partial(ranking_loss, **_arrays(batch)))


def _term(batch: PairBatch, loss: Callable[..., dict[str, mx.array]]) -> Term:
    names = [str(text) for text in batch.texts_BM.T.ravel()]
    return Term(_inputs(batch), loss, names={"hardest_id": names}, division=Division(functools.partial(_parts, batch), _join))


def _inputs(batch: PairBatch) -> dict[str, Any]:
    """Return the encoder's inputs for a batch: token ids (`ids`) and padding masks (`real`). Each is a list of two
    arrays, one for the queries and one for the documents. The shapes are `(pairs, tokens)` and `(documents, tokens)`.
    """
    K = batch.document_BMK.shape[-1]
    ids = [mx.array(batch.query_BQ), mx.array(batch.document_BMK.reshape(-1, K))]
    real = [mx.array(batch.query_real_BQ), mx.array(batch.document_real_BMK.reshape(-1, K))]
    return {"ids": ids, "real": real}


def _parts(batch: PairBatch, samples: int) -> list[dict[str, Any]]:
    count = len(batch.samples)
    return [_inputs(batch.select(start, min(start + samples, count))) for start in range(0, count, samples)]


def _join(parts: Sequence[Vectors]) -> Vectors:
    return [mx.concatenate(list(each)) for each in zip(*parts, strict=True)]


def _arrays(batch: PairBatch) -> dict[str, Any]:
    """Return the masks of `batch` that a loss function takes, as a dict from argument name to array. `query_real` and
    `document_real` have the shape `(texts, tokens)` and are False for padding. `same` has the shape
    `(queries, documents)`. It is True if the document must not count as a negative of the query.

    Documents are ordered with all own documents first, then the first negatives of all pairs, and so on.
    """
    K = batch.document_BMK.shape[-1]
    real_NK = batch.document_real_BMK.swapaxes(0, 1).reshape(-1, K)
    same_BN = late.same_group(batch.groups_B.tolist(), batch.document_groups_BM.T.ravel().tolist())
    empty_N = ~mx.any(mx.array(real_NK), axis=1)  # stands for a hard negative that a pair does not have
    return {"query_real": mx.array(batch.query_real_BQ), "document_real": mx.array(real_NK), "same": same_BN | empty_N[None]}


def _own_first(document_NKE: mx.array, pairs: int) -> mx.array:
    """Return the documents of a batch in another order. The order of two pairs, (own 1, negative 1, own 2, negative 2),
    becomes (own 1, own 2, negative 1, negative 2). `document_NKE` and the result have the shape `(documents, tokens,
    width)`. `pairs` is the number of pairs.
    """
    N, K, E = document_NKE.shape
    return document_NKE.reshape(pairs, N // pairs, K, E).swapaxes(0, 1).reshape(N, K, E)


@functools.cache
def training_loss(kind: str, mean: bool, symmetric: bool, top_k: int, with_margin: bool) -> Callable[..., dict[str, mx.array]]:
    """Return a loss function. The function takes the vectors of queries and documents. It returns a dict, in which
    "loss" holds the loss of each query. `kind` chooses the score of a query with a document: "info_nce" for MaxSim, or
    "xtr" for XTR. If `mean` is True, MaxSim is the mean over the query tokens, otherwise the sum. For XTR, each query
    token selects the `top_k` most similar document tokens of the batch. If `symmetric` is True, each document is also
    compared with all queries. If `with_margin` is True, a margin loss is added.

    With both values of `kind`, the loss is InfoNCE: the cross-entropy of choosing the query's own document by the
    scores. MaxSim adds, for each query token, the largest similarity with a token of the document. XTR counts only
    similarities with selected tokens, and takes the mean over the query tokens that selected a token of the document.
    The margin loss is 0 if the score of the own document is at least `margin` above the score of every negative (a
    wrong document), and larger otherwise.

    The function takes a list of two arrays: the vectors of the queries and those of the documents. It also takes the
    masks of `_arrays`, and the scalars `temperature`, `margin` and `margin_weight`. It returns a dict of arrays with
    one value per query: "loss", and the statistics of `late_interaction.in_batch_rows`. Equal arguments return the same
    function object, so that it is compiled only once.
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
    """Return the validation loss of each query, as a dict from name to array `(queries,)`. "loss" is 1 minus the
    reciprocal rank of the query's own document. "rank" is this rank, from 1. `vectors` is a list: query vectors
    `(queries, tokens, width)`, then document vectors `(documents, tokens, width)`. `query_real` and `document_real`,
    `(texts, tokens)`, are False for padding. `same`, `(queries, documents)`, is True if the document is left out of the
    query's ranking.

    Documents are ranked by MaxSim: the mean over query tokens of the largest similarity. The statistics are those of
    `late_interaction.in_batch_rows`.
    """
    scores_BN = late.maxsim(vectors[0], query_real, _own_first(vectors[1], len(vectors[0])), document_real)
    rows = late.in_batch_rows(scores_BN, same)
    return {"loss": 1 - 1 / rows["rank"].astype(mx.float32), **rows}


def zero_inputs(samples: int, documents: int, query: int, document: int) -> dict[str, Any]:
    """Return inputs of the encoder for `samples` pairs, to estimate memory. The dict has token ids of 0 (`ids`) and
    masks of True (`real`). Each is a list of two arrays, one for the queries and one for the documents. `documents` is
    the number of documents per pair. `query` and `document` are the numbers of tokens of a query and of a document.
    """
    shapes = (samples, query), (samples * documents, document)
    return {"ids": [mx.zeros(s, mx.int32) for s in shapes], "real": [mx.ones(s, mx.bool_) for s in shapes]}
