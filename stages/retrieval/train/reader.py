"""Read batches of pairs: token ids from disk, padded, as arrays in host memory.

B pairs, M documents of a pair (its own, then hard negatives), Q tokens of a query, K tokens of a document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from schemas.retrieval.tokens import TOKENS
from stages.retrieval.train.dataset import Dataset, Pair
from stages.run import Run, TensorReader

QUERY_STEP, DOCUMENT_STEP = 16, 32  # texts are padded to multiples of these: few shapes, so a GPU compiles few kernels


@dataclass(frozen=True)
class Sample:
    """A training pair in one pass over the data."""

    pair: Pair
    epoch: int = 0  # from 0


@dataclass
class PairBatch:
    """A batch of pairs with M documents each."""

    samples: Sequence[Sample]
    query_BQ: np.ndarray  # noqa: N815  # int32 token ids, padded with 0
    query_real_BQ: np.ndarray  # noqa: N815  # False for padding
    document_BMK: np.ndarray  # noqa: N815  # document 0 is the pair's own, the others hard negatives, or all padding
    document_real_BMK: np.ndarray  # noqa: N815
    groups_B: np.ndarray  # noqa: N815  # numbers of duplicate groups within the batch
    document_groups_BM: np.ndarray  # noqa: N815
    texts_BM: np.ndarray  # noqa: N815  # text_id; "" for a missing document

    @property
    def tokens(self) -> int:
        """Of one pair, padding included."""
        return int(self.query_BQ.shape[1] + self.document_BMK.shape[1] * self.document_BMK.shape[2])

    def select(self, start: int, stop: int) -> PairBatch:
        return replace(self, **{name: value[start:stop] for name, value in vars(self).items()})


class PairReader:
    """Token ids of the table `tokens`. `negatives`: hard negatives per pair."""

    def __init__(self, run: Run[Any], data: Dataset, negatives: int) -> None:
        self.tokens: TensorReader = run.inputs.tensors(TOKENS)
        self.data, self.negatives = data, negatives

    def prefetch(self, samples: Iterable[Sample]) -> None:
        """Start to read; what was read before is released."""
        self.tokens.ahead(sorted({text for sample in samples for text in sample.pair.texts}))

    def read(self, step: int, samples: Sequence[Sample]) -> PairBatch:
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
        """The number of a document's duplicate group within the batch."""
        # A hard negative may answer no query, and is a group of its own.
        name = self.data.groups.get(text, f"text {text}")
        return numbers.setdefault(name, len(numbers))


def padded(many: Sequence[np.ndarray], step: int) -> tuple[np.ndarray, np.ndarray]:
    """Int32 ids padded with 0, and the mask, False for padding: (sequences, longest rounded up to `step`)."""
    length = -(-max(len(ids) for ids in many) // step) * step
    ids_NL, real_NL = np.zeros((len(many), length), np.int32), np.zeros((len(many), length), bool)
    for row, ids in enumerate(many):
        ids_NL[row, : len(ids)] = ids
        real_NL[row, : len(ids)] = True
    return ids_NL, real_NL


class HeldOutPairs:
    """The validation pairs as one batch, in which each query is ranked against all documents."""

    def __init__(self, run: Run[Any], data: Dataset) -> None:
        self.run, self.data = run, data

    @property
    def count(self) -> int:
        return len(self.data.held)

    def micro_batches(self) -> Iterator[PairBatch]:
        # A reader of its own: this and the training reader release memory at different times.
        reader = PairReader(self.run, self.data, 0)
        yield reader.read(0, [Sample(pair) for pair in self.data.held])
