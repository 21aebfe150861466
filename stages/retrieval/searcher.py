"""Answer queries over an index: semantic, lexical or hybrid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from stages.retrieval import texts
from stages.retrieval.index import MATRIX, PARTITIONS, WORDS, digest, document_order
from stages.retrieval.search import fusion
from stages.retrieval.search.lexical import LexicalIndex
from stages.retrieval.search.maxsim import TokenMatrix, matches
from stages.retrieval.search.partitions import PartitionedIndex

Row = dict[str, Any]
Mode = Literal["semantic", "lexical", "hybrid"]

RESIDENT_BYTES = 2**30  # a matrix of at most this size, as float32, is held in memory if many queries are to be answered


class QueryEncoder(Protocol):
    """The interface of an object that encodes queries as token vectors."""

    def encode_queries(self, queries: Sequence[str]) -> list[np.ndarray]:
        """Encode `queries`, a sequence of texts. Return one float32 array per query, of shape (tokens, features). Each
        row is the vector of one token and has length 1.
        """


@dataclass(frozen=True)
class Answer:
    """A unit that a search has found. `row` is its row of the table `index`. `place` is its position in the index, from
    0. `semantic` and `lexical` are the scores of the two searches. Each is None if that search did not run. `score` is
    the score by which the answers were sorted.
    """

    row: Row
    place: int
    score: float
    semantic: float | None
    lexical: float | None


class Searcher:
    """A searchable index of source code. `rows` are all rows of the table `index`. `artifacts` is the folder of the
    files that belong to this table, such as the matrix of vectors. `encoder` turns queries into vectors; with None,
    only lexical search works. `weight` is the share of the semantic scores in hybrid search, 0 to 1. Raises ValueError
    if a file of the index is missing.

    If `resident` is True, vectors that fit into 1 GiB are read into memory. Many queries are then answered faster.
    """

    def __init__(
        self,
        rows: list[Row],
        artifacts: Path,
        encoder: QueryEncoder | None,
        weight: float = fusion.DEFAULT_WEIGHT,
        *,
        resident: bool = False,
    ) -> None:
        self.rows = sorted(rows, key=document_order)
        self.encoder, self.weight = encoder, weight
        name = digest(self.rows)
        if not (artifacts / MATRIX.format(name)).is_file() or not (artifacts / WORDS.format(name)).is_dir():
            raise ValueError(f"the index in {artifacts} is incomplete or of another state of the project: run make index")
        self.words = LexicalIndex(artifacts / WORDS.format(name), len(rows))
        self.vectors: TokenMatrix | PartitionedIndex | None = None
        if encoder is not None:
            counts = [row["count"] for row in self.rows]
            file = artifacts / MATRIX.format(name)
            resident = resident and 2 * file.stat().st_size <= RESIDENT_BYTES
            self.matrix = TokenMatrix.open(file, counts, resident=resident)
            parts = artifacts / PARTITIONS.format(name)
            self.vectors = PartitionedIndex(parts, len(rows)) if parts.is_dir() else self.matrix

    def search(self, query: str, mode: Mode = "hybrid", limit: int = 10, path: str = "") -> list[Answer]:
        """Return the best answers to `query`, at most `limit`, the best first. Each answer is a unit, such as a
        function in a source file. `mode` is "semantic", "lexical" or "hybrid". `path` is a wildcard pattern, such as
        "*/email/*", that the unit's file must match. Raises ValueError if the query has no word.
        """
        if not texts.words(query):
            raise ValueError(f"the query must have a word, got {query!r}")
        lexical = None if mode == "semantic" else self.words.scores(query)
        semantic = None if mode == "lexical" else self._semantic(query)
        scores = self._combine(semantic, lexical)
        places = np.arange(len(self.rows))
        if path:
            places = places[[fnmatchcase(row["path"], path) for row in self.rows]]
        if mode == "lexical" and lexical is not None:
            places = places[lexical[places] > 0]
        best = places[np.lexsort((places, -scores[places]))][:limit]
        return [
            Answer(
                self.rows[place],
                int(place),
                float(scores[place]),
                None if semantic is None else float(semantic[place]),
                None if lexical is None else float(lexical[place]),
            )
            for place in best
        ]

    def _semantic(self, query: str) -> np.ndarray:
        assert self.encoder is not None and self.vectors is not None, "semantic search needs an encoder"
        self.query_vectors = self.encoder.encode_queries([query])[0]
        found: np.ndarray = self.vectors.scores([self.query_vectors])[0]
        return found

    def _combine(self, semantic: np.ndarray | None, lexical: np.ndarray | None) -> np.ndarray:
        if semantic is None or lexical is None:
            found = lexical if semantic is None else semantic
            assert found is not None
            return found
        return fusion.hybrid(semantic, lexical, self.weight)

    def explain(self, answer: Answer, query_tokens: list[str], document_tokens: list[str]) -> list[tuple[str, str, float]]:
        """Explain why a search found `answer`. Return one tuple `(query_token, document_token, product)` per token of
        the query. `answer` is one of the answers of the last call of `search` in the mode "semantic" or "hybrid".
        `query_tokens` holds the texts of all tokens of that call's query. `document_tokens` holds the texts of all
        tokens of the answer. `document_token` is the token of the answer that matches `query_token` best. `product` is
        the dot product of the vectors of the two tokens.

        The searcher keeps the vectors of that query, but not the texts of its tokens. Both lists of texts must have the
        order of the vectors.
        """
        document = self.matrix.document(answer.place)
        best, products = matches(self.query_vectors, document)
        return [
            (query_tokens[number], document_tokens[place], float(product))
            for number, (place, product) in enumerate(zip(best.tolist(), products.tolist(), strict=True))
        ]
