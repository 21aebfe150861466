"""Score documents for a query by MaxSim: the mean over query tokens of the best product with a token of the document.
Of many documents, those are scored exactly that one vector each, and their words, bring near the query.

Letters in names of arrays: N documents, T tokens of all documents together, Q tokens of a query, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

CHUNK = 4096  # tokens of documents that are unpacked and multiplied at once, at most: 2 MB of float32 at width 128
PRODUCTS = 2**22  # products that are held at once, of which many queries have many per token: 16 MB of float32


def wide(vectors_TD: np.ndarray) -> np.ndarray:
    return np.asarray(vectors_TD, np.float32)


class TokenMatrix:
    """The vectors of all documents in turn, may be memory-mapped. `counts`: tokens per document, never 0. `unpack`: makes them
    float32, of length 1.
    """

    def __init__(
        self,
        vectors_TD: np.ndarray,
        counts: Sequence[int] | np.ndarray,
        unpack: Callable[[np.ndarray], np.ndarray] = wide,
    ) -> None:
        self.vectors_TD, self.unpack = vectors_TD, unpack
        self.starts_N = np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))])
        if len(self.starts_N) < 2 or np.any(np.diff(self.starts_N) < 1) or self.starts_N[-1] != len(vectors_TD):
            raise ValueError(f"the matrix has {len(vectors_TD)} vectors, its documents {self.starts_N[-1]}, each at least one")

    @property
    def width(self) -> int:
        return int(self.unpack(self.vectors_TD[:1]).shape[1])

    def unpacked(self) -> TokenMatrix:
        """The same in float32, for many queries."""
        return TokenMatrix(self.unpack(self.vectors_TD), np.diff(self.starts_N))

    def scores(self, queries: Sequence[np.ndarray]) -> np.ndarray:
        """MaxSim (queries, documents), float32. Each query is (tokens, width), with at least one token."""
        for query in queries:
            if query.ndim != 2 or query.shape[1] != self.width or not len(query):
                raise ValueError(f"a query has vectors of shape {query.shape}, the index of width {self.width}: run make index")
        together_QD = np.concatenate([np.asarray(query, np.float32) for query in queries])
        first_of_query = np.concatenate([[0], np.cumsum([len(query) for query in queries])])
        lengths = np.diff(first_of_query)
        found = np.empty((len(queries), len(self.starts_N) - 1), np.float32)
        for first, last in self._chunks(min(CHUNK, PRODUCTS // len(together_QD))):
            start, end = self.starts_N[first], self.starts_N[last]
            # One product and a segmented maximum: 17 ms a query over 255,184 vectors on 2 cores; LanceDB's flat search took
            # 250 to 370.
            products_TQ = self.unpack(self.vectors_TD[start:end]) @ together_QD.T
            best_NQ = np.maximum.reduceat(products_TQ, self.starts_N[first:last] - start, axis=0)
            found[:, first:last] = (np.add.reduceat(best_NQ, first_of_query[:-1], axis=1) / lengths).T
        return found

    def _chunks(self, tokens: int) -> Iterator[tuple[int, int]]:
        """(first, last + 1) of consecutive documents with at most `tokens` tokens; a longer document is alone."""
        first, count = 0, len(self.starts_N) - 1
        while first < count:
            last = max(first + 1, int(np.searchsorted(self.starts_N, self.starts_N[first] + tokens, "right")) - 1)
            yield first, last
            first = last


def matches(query_QD: np.ndarray, document_TD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(position of the best document token, its product) per query token."""
    products_QT = np.asarray(query_QD, np.float32) @ np.asarray(document_TD, np.float32).T
    best = products_QT.argmax(axis=1)
    return best, products_QT[np.arange(len(best)), best]


# 73,200 units of 180 packages, 500 docstrings: the exact top 10 of float16 vectors is found to .986, of the stored ones to .995;
# without the words to .966 and .973, with 800 and the words to .989 and .998.
CANDIDATES = 400  # documents that are compared in full because their pooled vectors are near
WORDED = 200  # and because of their words, at most
SAMPLE = 256  # and to estimate the scores of the others


def pool(vectors_TD: np.ndarray) -> np.ndarray:
    """Float32 (D,): the direction of the mean of a document's vectors."""
    return unit(np.asarray(vectors_TD, np.float32).mean(axis=0))


def unit(vectors: np.ndarray) -> np.ndarray:
    """Each vector scaled to length 1."""
    found: np.ndarray = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-9)
    return found


class PooledMatrix:
    """One vector per document, by which those are found that are worth comparing in full. `read`: those at some places."""

    def __init__(self, pooled_ND: np.ndarray, read: Callable[[list[int]], TokenMatrix]) -> None:
        wide_ND = np.asarray(pooled_ND, np.float32)
        # What all documents have in common tells none from another: .948 of the top 10 without this, .973 with it.
        self.pooled_ND, self.read = unit(wide_ND - wide_ND.mean(axis=0)), read

    def scores(self, query_QD: np.ndarray, places: np.ndarray, words_N: np.ndarray, limit: int) -> np.ndarray:
        """MaxSim (N,), float32: exact for the best of `places` and a sample of all; for the others an estimate, below the best
        `limit` of `places`. `words_N`: full-text scores; the best of them are candidates, too.
        """
        if query_QD.shape[1] != self.pooled_ND.shape[1]:
            raise ValueError(
                f"a query has vectors of width {query_QD.shape[1]}, the index {self.pooled_ND.shape[1]}: run make index"
            )
        near_N = self.pooled_ND @ query_QD.mean(axis=0)
        sample, sample_of = self.sample
        worded = places[words_N[places] > 0]
        best = np.union1d(_best(near_N, places, max(CANDIDATES, limit)), _best(words_N, worded, max(WORDED, limit)))
        exact = self.read(best.tolist()).scores([query_QD])[0] if len(best) else np.zeros(0, np.float32)
        # The others get the mean and the spread of the sample, so that z-scores are those of a full comparison.
        sampled = sample_of.scores([query_QD])[0]
        spread = sampled.std() / max(near_N[sample].std(), 1e-9)
        found = np.asarray(sampled.mean() + spread * (near_N - near_N[sample].mean()), np.float32)
        answers = np.sort(exact)[-limit:]
        np.minimum(found, answers[0] if len(answers) else -1, out=found)
        found[sample], found[best] = sampled, exact
        return found

    @cached_property
    def sample(self) -> tuple[np.ndarray, TokenMatrix]:
        places = np.linspace(0, len(self.pooled_ND) - 1, min(SAMPLE, len(self.pooled_ND))).astype(np.int64)
        return places, self.read(places.tolist()).unpacked()


def _best(scores: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    found: np.ndarray = places if len(places) <= count else places[np.argpartition(-scores[places], count)[:count]]
    return found


def top(scores: np.ndarray, count: int) -> np.ndarray:
    """The positions of the `count` best, best first; of equal ones the earlier."""
    if len(scores) <= count:
        return np.argsort(-scores, kind="stable")
    # A sort of 72,000 scores takes 5 ms.
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    some = np.flatnonzero(scores >= least)
    found: np.ndarray = some[np.argsort(-scores[some], kind="stable")[:count]]
    return found
