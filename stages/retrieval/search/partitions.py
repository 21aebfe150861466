"""Find documents among many millions of token vectors with LanceDB's multivector index, whose candidates are scored exactly."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

PROBES = 8  # partitions that are read per query token
REFINE = 20  # candidates that are scored exactly, as a multiple of the answers: without it the order is approximate
BATCH = 256  # documents per batch of the table
FOUND = 200  # answers per query
TABLE = "vectors"


def build(folder: Path, vectors: Iterator[np.ndarray], width: int, tokens: int) -> None:
    """Build a search index of the token vectors of documents, and write it into the new folder `folder`. `vectors`
    yields one array per document, (tokens of the document, `width`). `tokens` is the number of tokens of all documents
    together. It determines the number of partitions of the index.
    """
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
    """A multivector search index that `build` has written into `folder`. `count` is the number of its documents. Raises
    ValueError if `folder` holds no such index.
    """

    def __init__(self, folder: Path, count: int) -> None:
        import lancedb

        self.count = count
        try:
            self.table: Any = lancedb.connect(folder).open_table(TABLE)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{folder} holds no vector index ({type(error).__name__}); delete it and run make index") from None

    def scores(self, queries: list[np.ndarray]) -> np.ndarray:
        """Return the score of every document for every query, as a float32 array (queries, documents). Each query is an
        array of token vectors (tokens, width). The index finds only the best documents of a query. Each document that
        the index does not find gets the lowest score of the found documents.

        If the index finds no document, all scores of the query are 0.
        """
        found = np.empty((len(queries), self.count), np.float32)
        for row, query in zip(found, queries, strict=True):
            search = self.table.search(np.asarray(query, np.float32), vector_column_name="vectors").distance_type("cosine")
            search = search.nprobes(PROBES).refine_factor(REFINE).select(["number", "_distance"]).limit(min(FOUND, self.count))
            answer = search.to_arrow()
            scores = (len(query) - answer["_distance"].to_numpy()) / len(query)
            row[:] = scores.min() if len(scores) else 0.0
            row[answer["number"].to_numpy()] = scores
        return found
