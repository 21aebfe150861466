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
from stages.retrieval.search.lexical import DEFAULT_WEIGHT, LexicalIndex, hybrid
from stages.retrieval.search.maxsim import PartitionedIndex, TokenMatrix, matches

Row = dict[str, Any]
Mode = Literal["semantic", "lexical", "hybrid"]

RESIDENT_BYTES = 2**30  # a matrix of at most this size, as float32, is held in memory if many queries are to be answered


class QueryEncoder(Protocol):
    def encode_queries(self, queries: Sequence[str]) -> list[np.ndarray]:
        """Float32 (tokens, width) per query, each vector of length 1."""


@dataclass(frozen=True)
class Answer:
    """A unit that a search has found."""

    row: Row  # of the table `index`
    place: int  # in the index, from 0
    score: float  # by which answers are sorted
    semantic: float | None  # None: that search did not run
    lexical: float | None


class Searcher:
    """`rows`: the whole table `index`. `encoder` None: lexical search only. `weight`: share of the semantic scores in hybrid
    search.

    `resident` reads vectors of up to 1 GiB into memory, which answers many queries faster. Raises ValueError if a file is
    missing.
    """

    def __init__(
        self,
        rows: list[Row],
        artifacts: Path,
        encoder: QueryEncoder | None,
        weight: float = DEFAULT_WEIGHT,
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
        """The best answers, at most `limit`. `path` is a wildcard pattern of files. ValueError for a query without words."""
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
        return hybrid(semantic, lexical, self.weight)

    def explain(self, answer: Answer, query_tokens: list[str], document_tokens: list[str]) -> list[tuple[str, str, float]]:
        """(query token, best token of the document, product) per query token, for an answer of the last search with the
        encoder.

        The lists of token texts must have the order of the vectors.
        """
        document = self.matrix.document(answer.place)
        best, products = matches(self.query_vectors, document)
        return [
            (query_tokens[number], document_tokens[place], float(product))
            for number, (place, product) in enumerate(zip(best.tolist(), products.tolist(), strict=True))
        ]
