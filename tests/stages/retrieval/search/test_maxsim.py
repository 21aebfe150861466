"""MaxSim: exact over a matrix of token vectors, and over candidates."""

from __future__ import annotations

import numpy as np
import pytest

from stages.retrieval.search import codes, maxsim


def matrix_of(documents: list[np.ndarray], places: list[int]) -> maxsim.TokenMatrix:
    return maxsim.TokenMatrix(np.concatenate([documents[place] for place in places]), [len(documents[place]) for place in places])


def corpus(documents: int = 50, width: int = 16, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    draws = np.random.default_rng(seed)

    def text(tokens: int) -> np.ndarray:
        vectors = draws.normal(size=(tokens, width))
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)

    return [text(int(draws.integers(1, 30))) for _ in range(documents)], [text(n).astype(np.float32) for n in (1, 5, 12)]


def brute_force(documents: list[np.ndarray], query: np.ndarray) -> list[float]:
    return [float((query.astype(np.float64) @ each.astype(np.float64).T).max(axis=1).mean()) for each in documents]


def test_scores_equal_brute_force_whatever_the_chunk_and_another_width_or_number_of_documents_is_refused(monkeypatch):
    documents, queries = corpus()
    matrix = matrix_of(documents, list(range(50)))
    expected = np.array([brute_force(documents, query) for query in queries])
    for chunk in (1, 7, 100, 65_536):
        monkeypatch.setattr(maxsim, "CHUNK", chunk)
        np.testing.assert_allclose(matrix.scores(queries), expected, atol=1e-6)
    with pytest.raises(ValueError, match="the index of width 16"):
        matrix.scores([np.zeros((3, 8), np.float32)])
    with pytest.raises(ValueError, match="vectors, its documents"):
        maxsim.TokenMatrix(np.concatenate(documents), [len(each) for each in documents[:-1]])


def test_six_bits_a_value_keep_the_direction_of_a_vector_and_pack_again_to_the_same_bytes():
    documents, _ = corpus()
    for document in documents:
        packed = codes.pack(document)
        found = codes.unpack(packed)
        assert packed.shape == (len(document), 12) and found.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
        assert (found * document).sum(axis=1).min() > 0.998
        np.testing.assert_array_equal(codes.pack(found), packed)


def test_of_equal_scores_the_earlier_are_the_best():
    scores = np.random.default_rng(0).integers(0, 9, 200).astype(np.float32)
    for count in (1, 30, 199, 200, 300):
        np.testing.assert_array_equal(maxsim.top(scores, count), np.argsort(-scores, kind="stable")[:count])


@pytest.mark.parametrize("limit", [1, 40])
def test_candidates_are_scored_exactly_and_the_others_below_them_with_the_mean_and_spread_of_all(limit, monkeypatch):
    for name, value in {"CANDIDATES": 50, "WORDED": 5, "SAMPLE": 100}.items():
        monkeypatch.setattr(maxsim, name, value)
    documents, _ = corpus(documents=600)
    draws = np.random.default_rng(1)
    topics = draws.normal(size=(600, 16)) / 4  # what a document is about, in each of its tokens
    documents = [maxsim.unit(each + topic).astype(np.float16) for each, topic in zip(documents, topics, strict=True)]
    matrix = maxsim.PooledMatrix(np.stack([maxsim.pool(each) for each in documents]), lambda places: matrix_of(documents, places))
    words = np.zeros(600)
    words[[5, 77, 400]] = 1.0
    for place in draws.integers(0, 600, 20).tolist():
        query = documents[place][:8].astype(np.float32)
        exact = np.array(brute_force(documents, query))
        found = matrix.scores(query, np.arange(600), words, limit)
        same = np.isclose(found, exact, atol=1e-5)
        assert found.argmax() == place and same[[5, 77, 400]].all() and same.sum() < 160
        assert same[np.argsort(-found)[:limit]].all()
        assert found.mean() == pytest.approx(exact.mean(), abs=0.05) and found.std() == pytest.approx(exact.std(), rel=0.35)
        few = matrix.scores(query, np.array([2, 9]), words, limit)
        np.testing.assert_allclose(few[[2, 9]], exact[[2, 9]], atol=1e-5)
