"""Which pairs a run trains on and is measured by, and batches of them: token ids from disk, padded, in host memory.

B pairs, M documents of a pair (its own, then hard negatives), Q tokens of a query, K tokens of a document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from schemas.retrieval import NEGATIVES, PAIRS, TOKENS
from stages.retrieval.encoder import padded
from stages.retrieval.texts import Row, used_pairs
from stages.retrieval.train.config import TrainConfig
from stages.run import Run, TensorReader
from stages.tuner import draws


@dataclass(frozen=True)
class Pair:
    pair_id: str
    query_id: str  # key of the table `tokens`, as are `text_id` and `negatives`
    text_id: str  # of its own document
    group: str  # duplicate group, whose documents are never negatives of the query
    length: int  # tokens of its own document
    negatives: tuple[str, ...] = ()  # hard negatives, the hardest first

    @property
    def texts(self) -> tuple[str, ...]:
        return self.query_id, self.text_id, *self.negatives


@dataclass(frozen=True)
class Dataset:
    trained: tuple[Pair, ...]  # sorted by pair_id
    held: tuple[Pair, ...]  # sorted by pair_id
    counts: dict[str, int]  # text_id -> tokens
    groups: dict[str, str]  # text_id of a pair's document -> duplicate group; lacks documents that answer no query

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest query and of the longest document, hard negatives included."""
        pairs = (*self.trained, *self.held)
        documents = [text for pair in pairs for text in pair.texts[1:]]
        return max(self.counts[pair.query_id] for pair in pairs), max(self.counts[text] for text in documents)


def load_dataset(run: Run[TrainConfig]) -> Dataset:
    """Raises ValueError if pairs are too few, a text has no token ids, or hard negatives are asked for and there are none."""
    config = run.config
    rows = used_pairs(run.inputs.rows(PAIRS))
    training = [row for row in rows if row["split"] == "train"]
    if not training:
        raise ValueError(f"train: there are no pairs to train on: of {len(rows)} usable pairs none is in the split train")
    if len(training) < config.batch_size:
        raise ValueError(f"train.batch_size must be <= {len(training)}, the number of training pairs, got {config.batch_size}")
    counts = dict(zip(*(run.inputs.rows(TOKENS)[name].to_pylist() for name in ("text_id", "count")), strict=True))
    groups = {row["text_id"]: row["duplicate_group"] for row in rows}
    negatives: dict[str, list[str]] = {}  # pair_id -> text_ids, the hardest first
    if config.hard_negatives:
        for row in sorted(run.inputs.rows(NEGATIVES).to_pylist(), key=lambda row: (row["pair_id"], row["position"])):
            negatives.setdefault(row["pair_id"], []).append(row["text_id"])
        if not negatives:
            raise ValueError("train.hard_negatives must be 0: the table negatives is empty; set [negatives] count")
    held: list[Row] = []
    if config.validation:
        valid = [row for row in rows if row["split"] == "valid"]
        if len(valid) < 2:
            raise ValueError(f"[train.validation] needs at least 2 pairs in the split valid, got {len(valid)}; change [pairs]")
        drawn = sorted(valid, key=lambda row: draws.uniform(config.seed, f"held out {row['pair_id']}"))
        held = sorted(drawn[: config.validation.queries], key=lambda row: str(row["pair_id"]))
    return Dataset(
        tuple(_pair(row, counts, tuple(negatives.get(row["pair_id"], ())[: config.hard_negatives])) for row in training),
        tuple(_pair(row, counts, ()) for row in held),
        counts,
        groups,
    )


def _pair(row: Row, counts: dict[str, int], negatives: tuple[str, ...]) -> Pair:
    for text in (row["query_id"], row["text_id"], *negatives):
        if text not in counts:
            raise ValueError(f"train: the text {text[:12]} of pair {row['pair_id'][:12]} has no token ids; run the stage tokens")
    return Pair(row["pair_id"], row["query_id"], row["text_id"], row["duplicate_group"], counts[row["text_id"]], negatives)


QUERY_STEP, DOCUMENT_STEP = 16, 32  # texts are padded to multiples of these: few shapes, so a GPU compiles few kernels


@dataclass(frozen=True)
class Sample:
    pair: Pair
    epoch: int = 0  # from 0


@dataclass
class PairBatch:
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

    def __init__(self, run: Run[TrainConfig], data: Dataset, negatives: int) -> None:
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
        # A hard negative may answer no query, and is a group of its own.
        names_BM = [[self.data.groups.get(text, f"text {text}") for text in each] for each in texts]
        groups_BM = [[numbers.setdefault(name, len(numbers)) for name in each] for each in names_BM]
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


class HeldOutPairs:
    """The validation pairs as one batch, in which each query is ranked against all documents."""

    def __init__(self, run: Run[TrainConfig], data: Dataset) -> None:
        self.run, self.data = run, data

    @property
    def count(self) -> int:
        return len(self.data.held)

    def micro_batches(self) -> Iterator[PairBatch]:
        # A reader of its own: this and the training reader release memory at different times.
        reader = PairReader(self.run, self.data, 0)
        yield reader.read(0, [Sample(pair) for pair in self.data.held])
