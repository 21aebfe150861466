"""Full-text search over the words of units, with Lance: BM25 over identifiers that are already split; its sum with MaxSim."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stages.retrieval import texts

STALE = 1 / 32  # of the documents
FOUND = 1000  # documents per query that get a score; the others have 0
TABLE = "units.lance"


def build(folder: Path, words: Sequence[str] | pa.ChunkedArray, numbers: np.ndarray | None = None) -> None:
    """`words`: the words of each document, joined by spaces. `numbers`: what the documents are called; None: their places."""
    import lance

    table = lance.write_dataset(_rows(words, range(len(words)) if numbers is None else numbers), folder / TABLE)
    # Lance does not offer to split identifiers: the words come split.
    tokens: dict[str, Any] = {"base_tokenizer": "whitespace", "language": "English", "stem": True, "remove_stop_words": False}
    table.create_scalar_index("words", "INVERTED", with_position=False, **tokens)


def _rows(words: Sequence[str] | pa.ChunkedArray, numbers: Sequence[int] | np.ndarray) -> pa.Table:
    return pa.table({"number": pa.array(numbers, pa.int64()), "words": pa.array(words, pa.string())})


def revise(
    folder: Path, earlier: Path, numbers: np.ndarray, words: Callable[[np.ndarray], Sequence[str] | pa.ChunkedArray]
) -> bool:
    """Write an index of the documents called `numbers` from that in `earlier`, whose files are linked, and what is new.

    `words`: places -> words. False, and nothing is written, if more than STALE of the documents has changed since `build`:
    statistics of words are those of the build, and new documents are read whole for every query.
    """
    import lance

    table: Any = lance.dataset(earlier / TABLE)
    known = table.to_table(columns=["number"])["number"].to_numpy()
    new, gone = np.flatnonzero(~np.isin(numbers, known)), known[~np.isin(known, numbers)]
    first, *later = [fragment.physical_rows for fragment in table.get_fragments()]
    deleted = first + sum(later) - len(known)
    if sum(later) + deleted + len(new) + len(gone) > STALE * len(numbers):
        return False
    shutil.copytree(earlier / TABLE, folder / TABLE, copy_function=_link)
    if len(gone):
        lance.dataset(folder / TABLE).delete(f"number in ({', '.join(map(str, gone.tolist()))})")
    if len(new):
        lance.write_dataset(_rows(words(new), numbers[new]), folder / TABLE, mode="append")
    return True


def _link(source: str, target: str) -> None:
    # Lance never changes a file. Some file systems have no hard links.
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class LexicalIndex:
    """An index that `build` or `revise` wrote. Raises ValueError if there is none, or it has another number of documents."""

    def __init__(self, folder: Path, count: int, numbers: np.ndarray | None = None) -> None:
        import lance

        self.count, self.folder = count, folder
        numbers = np.arange(count) if numbers is None else numbers
        try:
            self.table: Any = lance.dataset(folder / TABLE)
            self.numbers = self.table.to_table(columns=["number"])["number"].to_numpy()
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{folder} holds no full-text index ({type(error).__name__}); delete it and run make index"
            ) from None
        rows_N, self.order = np.argsort(self.numbers), np.argsort(numbers)
        if not np.array_equal(self.numbers[rows_N], numbers[self.order]):
            rows = len(self.numbers)
            raise ValueError(f"{folder} has {rows} documents, not {count} of these; delete it and run make index")
        self.rows = np.empty(count, np.int64)
        self.rows[self.order] = rows_N
        self.numbers = numbers

    def scores(self, query: str) -> np.ndarray:
        """BM25, float32 (documents,), of the best FOUND; 0 for all others."""
        from lance.query import MatchQuery

        found = np.zeros(self.count, np.float32)
        if asked := " ".join(texts.words(query)):
            # Without `_score` among the columns, Lance prints a warning for every query.
            search = {"full_text_query": MatchQuery(asked, "words"), "columns": ["number", "_score"], "limit": FOUND}
            try:
                rows = self.table.to_table(**search)
            except (OSError, ValueError, RuntimeError) as error:
                reason = " ".join(str(error).split())[:200]
                raise ValueError(f"{self.folder} cannot be searched ({reason}): run latentmill verify --repair") from None
            found[self._places(rows)] = rows["_score"].to_numpy()
        return found

    def _places(self, rows: pa.Table) -> np.ndarray:
        found: np.ndarray = self.order[np.searchsorted(self.numbers, rows["number"].to_numpy(), sorter=self.order)]
        return found

    def words(self, places: np.ndarray) -> list[str]:
        """The words of these documents, joined by spaces."""
        if not len(places):
            return []
        return list(self.table.take(self.rows[places].tolist(), columns=["words"])["words"].to_pylist())


WEIGHTS = tuple(round(0.05 * n, 2) for n in range(21))  # of the semantic scores, from which the best on valid queries is taken
DEFAULT_WEIGHT = 0.5  # where nothing was measured yet


def zscores(scores: np.ndarray) -> np.ndarray:
    """Along the last axis. Equal scores become 0."""
    centred = scores - scores.mean(axis=-1, keepdims=True, dtype=np.float64)
    spread = centred.std(axis=-1, keepdims=True, dtype=np.float64)
    return np.asarray(centred / np.where(spread > 1e-12, spread, 1.0), np.float32)


def hybrid(semantic: np.ndarray, lexical: np.ndarray, weight: float) -> np.ndarray:
    """Weighted mean of the z-scores, documents on the last axis. `weight`: share of the semantic scores, 0 to 1."""
    # MRR@10 beyond BM25's, on 865 queries of the standard library: z-scores at .5 +.039 [.026, .052], reciprocal ranks at .2
    # +.009 [-.008, .026].
    return weight * zscores(semantic) + (1 - weight) * zscores(lexical)
