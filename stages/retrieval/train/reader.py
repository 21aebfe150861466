"""Read batches of pairs: token ids from disk, padded, as arrays in host memory.

B pairs, M documents of a pair (its own, then hard negatives), Q tokens of a query, K tokens of a document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from schemas.retrieval.tokens import TOKENS
from stages.retrieval.train.dataset import Dataset, Pair
from stages.stage import StageContext, TensorReader

QUERY_STEP, DOCUMENT_STEP = 16, 32  # texts are padded to multiples of these: few shapes, so a GPU compiles few kernels


@dataclass(frozen=True)
class Sample:
    """One training pair in one pass over the data. `pair` is the pair of a query and its document. `epoch` is the
    number of the pass, from 0.
    """

    pair: Pair
    epoch: int = 0


@dataclass
class PairBatch:
    """A batch of pairs, each with a query and `M` documents. The letters after a field's name are its shape: `B` pairs,
    `M` documents, `Q` tokens of a query and `K` of a document. `query_BQ` and `document_BMK` are int32 token ids,
    padded with 0. `query_real_BQ` and `document_real_BMK` are boolean masks, False for padding. Document 0 is the
    pair's own document. The others are hard negatives (misleading documents). If a pair has fewer of them, the rest is
    padding.

    `groups_B` and `document_groups_BM` hold the numbers of the duplicate groups of the queries and documents.
    `texts_BM` holds the keys of the documents. Keys are "" where a document is missing.
    """

    samples: Sequence[Sample]
    query_BQ: np.ndarray  # noqa: N815
    query_real_BQ: np.ndarray  # noqa: N815
    document_BMK: np.ndarray  # noqa: N815
    document_real_BMK: np.ndarray  # noqa: N815
    groups_B: np.ndarray  # noqa: N815
    document_groups_BM: np.ndarray  # noqa: N815
    texts_BM: np.ndarray  # noqa: N815

    @property
    def tokens(self) -> int:
        """The number of tokens of one pair, padding included: its query and all its documents."""
        return int(self.query_BQ.shape[1] + self.document_BMK.shape[1] * self.document_BMK.shape[2])

    def select(self, start: int, stop: int) -> PairBatch:
        """Return a new batch with the pairs from index `start` up to, but not including, index `stop`."""
        return replace(self, **{name: value[start:stop] for name, value in vars(self).items()})


class PairReader:
    """Read batches of token ids from the table `tokens` into host memory. `read(step, samples)` returns the token ids
    of some samples as one `PairBatch`. `prefetch(samples)` starts loading the token ids of these samples from disk, so
    that a later `read` need not wait.
    """

    def __init__(self, ctx: StageContext, data: Dataset, negatives: int) -> None:
        """Open the table `tokens` for reading. `ctx` gives access to the tables. `data` holds the pairs of the run.
        `negatives` is the number of hard negatives (misleading documents) per pair.
        """
        self.tokens: TensorReader = ctx.tensors(TOKENS)
        self.data, self.negatives = data, negatives

    def prefetch(self, samples: Iterable[Sample]) -> None:
        """Start reading the token ids of `samples` from disk, before they are needed. The memory of all token ids that
        were read before is released.
        """
        self.tokens.ahead(sorted({text for sample in samples for text in sample.pair.texts}))

    def read(self, step: int, samples: Sequence[Sample]) -> PairBatch:
        """Read the token ids of `samples` from disk as one padded `PairBatch` in host memory. `step` is not used."""
        pairs = [sample.pair for sample in samples]
        M = 1 + self.negatives
        texts = [([pair.text_id, *pair.negatives] + [""] * M)[:M] for pair in pairs]
        query_BQ, query_real_BQ = padded([self.tokens.read(pair.query_id) for pair in pairs], QUERY_STEP)
        flat = [self.tokens.read(text) if text else np.zeros(0, np.int32) for each in texts for text in each]
        document, real = padded(flat, DOCUMENT_STEP)
        numbers: dict[str, int] = {}
        groups_BM = [[self._group(text, numbers) for text in each] for each in texts]
        return PairBatch(
            list(samples),
            query_BQ,
            query_real_BQ,
            document.reshape(len(pairs), M, -1),
            real.reshape(len(pairs), M, -1),
            np.array([numbers.setdefault(pair.group, len(numbers)) for pair in pairs], np.int32),
            np.array(groups_BM, np.int32),
            np.array(texts),
        )

    def _group(self, text: str, numbers: dict[str, int]) -> int:
        """Return the number of a document's duplicate group, counted from 0 within a batch. A duplicate group is a set
        of pairs with equal queries or equal documents. `text` is the document's key in the table `tokens`, or "" for a
        missing document. The group's name is `self.data.groups[text]`. If that entry does not exist, the name is
        `f"text {text}"`. `numbers` maps the name of each group seen so far in the batch to its number. A new name is
        added with the next number.

        The names in `self.data.groups` are ids of pairs. `self.data.groups` has no entry for a document that answers no
        query, such as some hard negatives. Such a document gets a group of its own.
        """
        name = self.data.groups.get(text, f"text {text}")
        return numbers.setdefault(name, len(numbers))


def padded(many: Sequence[np.ndarray], step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sequences of token ids as one padded array and its mask, a pair. `many` holds one integer array per
    sequence. The result's array is int32 and padded with 0. The mask is boolean and False for padding. Both have the
    shape `(sequences, length)`. `length` is the number of tokens of the longest sequence, rounded up to a multiple of
    `step`.
    """
    length = -(-max(len(ids) for ids in many) // step) * step
    ids_NL, real_NL = np.zeros((len(many), length), np.int32), np.zeros((len(many), length), bool)
    for row, ids in enumerate(many):
        ids_NL[row, : len(ids)] = ids
        real_NL[row, : len(ids)] = True
    return ids_NL, real_NL


class HeldOutPairs:
    """The validation pairs of a run, as one batch. Each query is ranked against the documents of all these pairs.
    `count` is the number of pairs. `micro_batches()` yields the batch.
    """

    def __init__(self, ctx: StageContext, data: Dataset) -> None:
        self.ctx, self.data = ctx, data

    @property
    def count(self) -> int:
        """The number of held-out pairs."""
        return len(self.data.held)

    def micro_batches(self) -> Iterator[PairBatch]:
        """Read the held-out pairs from disk and yield them as a single batch. The batch has no hard negatives.

        The table `tokens` is opened separately from the training reader, because the two release memory at different
        times.
        """
        reader = PairReader(self.ctx, self.data, 0)
        yield reader.read(0, [Sample(pair) for pair in self.data.held])
