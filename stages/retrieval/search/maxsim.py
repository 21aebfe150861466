"""Score every document for a query by MaxSim: the mean over query tokens of the best product with a token of the document.
For many millions of tokens, candidates come from LanceDB's multivector index and are scored exactly.

Letters in names of arrays: N documents, T tokens of all documents together, Q tokens of a query, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

CHUNK = 65_536  # tokens of documents that are multiplied at once, at most: 32 MB of float32 at width 128
PRODUCTS = 2**22  # products that are held at once, of which many queries have many per token: 16 MB of float32


class TokenMatrix:
    """The vectors of all documents in turn: float16 or float32, may be memory-mapped. `counts`: tokens per document, never 0."""

    def __init__(self, vectors_TD: np.ndarray, counts: Sequence[int] | np.ndarray) -> None:
        self.vectors_TD = vectors_TD
        self.starts_N = np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))])
        if len(self.starts_N) < 2 or np.any(np.diff(self.starts_N) < 1) or self.starts_N[-1] != len(vectors_TD):
            raise ValueError(f"the matrix has {len(vectors_TD)} vectors, its documents {self.starts_N[-1]}, each at least one")

    @classmethod
    def open(cls, file: Path, counts: Sequence[int] | np.ndarray, *, resident: bool = False) -> TokenMatrix:
        """Memory-mapped, or with `resident` in memory as float32."""
        try:
            mapped = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"{file} cannot be read: {error}; delete it and run make index") from None
        return cls(mapped.astype(np.float32) if resident else mapped, counts)

    @property
    def width(self) -> int:
        return int(self.vectors_TD.shape[1])

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
            products_TQ = np.asarray(self.vectors_TD[start:end], np.float32) @ together_QD.T
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

    def document(self, number: int) -> np.ndarray:
        """Float32 (tokens, width)."""
        return np.asarray(self.vectors_TD[self.starts_N[number] : self.starts_N[number + 1]], np.float32)


def write_matrix(file: Path, vectors: Iterator[np.ndarray], tokens: int, width: int) -> None:
    """A float16 .npy of shape (tokens, width). The documents are never in memory together."""
    with file.open("wb") as opened:
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.float16)), "fortran_order": False, "shape": (tokens, width)}
        np.lib.format.write_array_header_1_0(opened, header)
        written = 0
        for each in vectors:
            opened.write(np.ascontiguousarray(each, np.float16).tobytes())
            written += len(each)
    assert written == tokens, f"{written} vectors were written, {tokens} announced"


def matches(query_QD: np.ndarray, document_TD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(position of the best document token, its product) per query token."""
    products_QT = np.asarray(query_QD, np.float32) @ np.asarray(document_TD, np.float32).T
    best = products_QT.argmax(axis=1)
    return best, products_QT[np.arange(len(best)), best]


# LanceDB 0.40 on 255,184 vectors, 64 partitions, 8 probes: 49 % of the exact top 10 unrefined, 80 % at 5, 97 % at 20.
PROBES = 8  # partitions that are read per query token
REFINE = 20  # candidates that are scored exactly, as a multiple of the answers: without it the order is approximate
BATCH = 256  # documents per batch of the table
FOUND = 200  # answers per query
TABLE = "vectors"


def build_partitions(folder: Path, vectors: Iterator[np.ndarray], width: int, tokens: int) -> None:
    """`vectors`: (tokens, width) per document. `tokens`: of all documents, which sets the number of partitions."""
    import lancedb
    from lancedb.index import IvfFlat

    kind = pa.list_(pa.list_(pa.float16(), width))
    schema = pa.schema([("number", pa.int64()), ("vectors", kind)])

    def batches() -> Iterator[pa.RecordBatch]:
        start = 0
        while some := list(islice(vectors, BATCH)):
            flat = np.concatenate(some).astype(np.float16)
            inner = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), width)
            offsets = pa.array(np.concatenate([[0], np.cumsum([len(each) for each in some])]), pa.int32())
            numbers = pa.array(range(start, start + len(some)), pa.int64())
            yield pa.record_batch([numbers, pa.ListArray.from_arrays(offsets, inner)], schema=schema)
            start += len(some)

    table = lancedb.connect(folder).create_table(TABLE, pa.RecordBatchReader.from_batches(schema, batches()))
    partitions = max(1, int(np.sqrt(tokens) / 4))
    table.create_index("vectors", config=IvfFlat(distance_type="cosine", num_partitions=partitions))


class PartitionedIndex:
    """Raises ValueError if `folder` holds no index."""

    def __init__(self, folder: Path, count: int) -> None:
        import lancedb

        self.count = count
        try:
            self.table: Any = lancedb.connect(folder).open_table(TABLE)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{folder} holds no vector index ({type(error).__name__}); delete it and run make index") from None

    def scores(self, queries: list[np.ndarray]) -> np.ndarray:
        """MaxSim (queries, documents), float32. Documents that are not found get the lowest score of those that are."""
        found = np.empty((len(queries), self.count), np.float32)
        for row, query in zip(found, queries, strict=True):
            search = self.table.search(np.asarray(query, np.float32), vector_column_name="vectors").distance_type("cosine")
            search = search.nprobes(PROBES).refine_factor(REFINE).select(["number", "_distance"]).limit(min(FOUND, self.count))
            answer = search.to_arrow()
            # LanceDB's distance is the number of query tokens less the sum of MaxSim, which is documented for cosine only.
            scores = (len(query) - answer["_distance"].to_numpy()) / len(query)
            row[:] = scores.min() if len(scores) else 0.0
            row[answer["number"].to_numpy()] = scores
        return found
