"""Exact MaxSim over a flat matrix of token vectors."""

from __future__ import annotations

import numpy as np
import pytest

from stages.retrieval.search import maxsim
from stages.retrieval.search.maxsim import TokenMatrix, matches, write_matrix


def corpus(documents: int = 50, width: int = 16, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    draws = np.random.default_rng(seed)

    def text(tokens: int) -> np.ndarray:
        vectors = draws.normal(size=(tokens, width))
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)

    return [text(int(draws.integers(1, 30))) for _ in range(documents)], [text(n).astype(np.float32) for n in (1, 5, 12)]


def brute_force(documents: list[np.ndarray], query: np.ndarray) -> list[float]:
    return [float((query.astype(np.float64) @ each.astype(np.float64).T).max(axis=1).mean()) for each in documents]


@pytest.mark.parametrize("chunk", [1, 7, 100, 65_536])
@pytest.mark.parametrize("resident", [False, True])
def test_scores_equal_brute_force_whatever_the_chunk(chunk, resident, tmp_path, monkeypatch):
    monkeypatch.setattr(maxsim, "CHUNK", chunk)
    documents, queries = corpus()
    counts = [len(each) for each in documents]
    write_matrix(tmp_path / "vectors.npy", iter(documents), sum(counts), 16)
    matrix = TokenMatrix.open(tmp_path / "vectors.npy", counts, resident=resident)
    expected = np.array([brute_force(documents, query) for query in queries])
    np.testing.assert_allclose(matrix.scores(queries), expected, atol=1e-6)


def test_a_matrix_on_disk_is_memory_mapped(tmp_path):
    documents, _ = corpus()
    counts = [len(each) for each in documents]
    write_matrix(tmp_path / "vectors.npy", iter(documents), sum(counts), 16)
    matrix = TokenMatrix.open(tmp_path / "vectors.npy", counts)
    assert isinstance(matrix.vectors_TD, np.memmap) and matrix.vectors_TD.dtype == np.float16
    np.testing.assert_array_equal(matrix.document(7), documents[7])


def test_a_matrix_of_other_documents_is_refused(tmp_path):
    documents, _ = corpus()
    counts = [len(each) for each in documents]
    file = tmp_path / "vectors.npy"
    write_matrix(file, iter(documents), sum(counts), 16)
    with pytest.raises(ValueError, match="vectors, its documents"):
        TokenMatrix.open(file, counts[:-1])
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"cannot be read: .*run make index"):
        TokenMatrix.open(file, counts)


def test_a_query_of_another_width_is_refused():
    documents, _ = corpus()
    matrix = TokenMatrix(np.concatenate(documents), [len(each) for each in documents])
    with pytest.raises(ValueError, match="the index of width 16"):
        matrix.scores([np.zeros((3, 8), np.float32)])


def test_each_query_token_is_matched_with_its_best_document_token():
    documents, queries = corpus()
    best, products = matches(queries[1], documents[3])
    table = queries[1] @ documents[3].astype(np.float32).T
    assert best.tolist() == table.argmax(axis=1).tolist()
    np.testing.assert_allclose(products, table.max(axis=1))


def test_the_partitioned_index_finds_nearly_what_exact_search_finds(tmp_path):
    documents, _ = corpus(documents=600)
    draws = np.random.default_rng(1)
    queries = [documents[place][:8].astype(np.float32) for place in draws.integers(0, 600, 20)]
    counts = [len(each) for each in documents]
    maxsim.build_partitions(tmp_path / "index", iter(documents), 16, sum(counts))
    exact = TokenMatrix(np.concatenate(documents), counts).scores(queries)
    found = maxsim.PartitionedIndex(tmp_path / "index", 600).scores(queries)
    assert (found.argmax(axis=1) == exact.argmax(axis=1)).mean() >= 0.95
    top = [len(set(np.argsort(-one)[:10]) & set(np.argsort(-other)[:10])) / 10 for one, other in zip(exact, found, strict=True)]
    assert np.mean(top) >= 0.9
    place = int(exact[0].argmax())
    assert found[0, place] == pytest.approx(exact[0, place], abs=2e-3)
