"""Full-text search over the words of units, with LanceDB: BM25 over identifiers that are already split."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stages.retrieval import texts

FOUND = 1000  # documents per query that get a score; the others have 0
TABLE = "units"


def build(folder: Path, words: Sequence[str]) -> None:
    """Write a full-text index into a new folder. `words` holds the words of every document, joined by spaces, in the order of the
    documents.
    """
    from lancedb.index import FTS

    rows = pa.table({"number": pa.array(range(len(words)), pa.int64()), "words": pa.array(words, pa.string())})
    table = _connect(folder).create_table(TABLE, rows)
    table.create_index("words", config=FTS(base_tokenizer="whitespace", language="English", stem=True, remove_stop_words=False))


class LexicalIndex:
    """A full-text index that `build` has written into `folder`. `count` is the expected number of documents. Raises
    ValueError if the folder holds no index, or if the index has another number of documents.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.count = count
        try:
            self.table: Any = _connect(folder).open_table(TABLE)
            rows = self.table.count_rows()
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{folder} holds no full-text index ({type(error).__name__}); delete it and run make index"
            ) from None
        if rows != count:
            raise ValueError(f"{folder} has {rows} documents, not {count}; delete it and run make index")

    def scores(self, query: str, without: str = "") -> np.ndarray:
        """Return the BM25 score of every document for a query, as float32 of shape `(documents,)`. `query` is plain
        text, without operators. The words of the text `without` are removed from the query. Only the best `FOUND`
        documents get a score. All others get 0.
        """
        from lancedb.query import MatchQuery

        found = np.zeros(self.count, np.float32)
        left_out = set(texts.words(without))
        asked = " ".join(word for word in texts.words(query) if word not in left_out)
        if asked:
            search = self.table.search(MatchQuery(asked, "words"), query_type="fts").select(["number", "_score"])
            rows = search.limit(FOUND).to_arrow()
            found[rows["number"].to_numpy()] = rows["_score"].to_numpy()
        return found


def _connect(folder: Path) -> Any:
    os.environ.setdefault("LANCE_LOG", "error")
    import lancedb

    return lancedb.connect(folder)
