"""Which pairs a run trains on, and which it is measured by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schemas.retrieval.negatives import NEGATIVES
from schemas.retrieval.pairs import PAIRS
from schemas.retrieval.tokens import TOKENS
from stages.retrieval.train.config import TrainConfig, ValidationConfig
from stages.run import Run
from stages.tuner import draws

Row = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """A query, its own document and hard negatives."""

    pair_id: str
    query_id: str  # key of the table `tokens`, as are `text_id` and `negatives`
    text_id: str  # of its own document
    group: str  # duplicate group, whose documents are never negatives of the query
    length: int  # tokens of its own document
    negatives: tuple[str, ...] = ()  # hard negatives, the hardest first

    @property
    def texts(self) -> tuple[str, ...]:
        """Query, own document, hard negatives."""
        return self.query_id, self.text_id, *self.negatives


@dataclass(frozen=True)
class Dataset:
    """The pairs of a run."""

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
    """Raises ValueError if there are fewer training pairs than a batch has, fewer than 2 to validate on, a text without token
    ids, or no hard negatives although they are asked for.
    """
    config = run.config
    rows = [row for row in run.inputs.rows(PAIRS).to_pylist() if row["rejected"] is None]
    counts = dict(zip(*(run.inputs.rows(TOKENS)[name].to_pylist() for name in ("text_id", "count")), strict=True))
    groups = {row["text_id"]: row["duplicate_group"] for row in rows}
    by_split: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: str(row["pair_id"])):
        by_split.setdefault(row["split"], []).append(row)
    training = by_split.get("train", [])
    if not training:
        raise ValueError(f"train: there are no pairs to train on: of {len(rows)} usable pairs none is in the split train")
    if len(training) < config.batch_size:
        raise ValueError(f"train.batch_size must be <= {len(training)}, the number of training pairs, got {config.batch_size}")
    negatives = _negatives(run, config) if config.hard_negatives else {}
    trained = tuple(_pair(row, counts, negatives.get(row["pair_id"], ())) for row in training)
    held = _held(config.validation, config.seed, by_split.get("valid", []), counts) if config.validation else ()
    return Dataset(trained, held, counts, groups)


def _negatives(run: Run[Any], config: TrainConfig) -> dict[str, tuple[str, ...]]:
    """pair_id -> text_ids, the hardest first."""
    found: dict[str, list[str]] = {}
    for row in sorted(run.inputs.rows(NEGATIVES).to_pylist(), key=lambda row: (row["pair_id"], row["position"])):
        found.setdefault(row["pair_id"], []).append(row["text_id"])
    if not found:
        raise ValueError("train.hard_negatives must be 0: the table negatives is empty; set [negatives] count")
    return {pair: tuple(texts[: config.hard_negatives]) for pair, texts in found.items()}


def _held(config: ValidationConfig, seed: int, rows: list[Row], counts: dict[str, int]) -> tuple[Pair, ...]:
    if len(rows) < 2:
        raise ValueError(f"[train.validation] needs at least 2 pairs in the split valid, got {len(rows)}; change [pairs]")
    drawn = sorted(rows, key=lambda row: draws.uniform(seed, f"held out {row['pair_id']}"))[: config.queries]
    return tuple(_pair(row, counts, ()) for row in sorted(drawn, key=lambda row: str(row["pair_id"])))


def _pair(row: Row, counts: dict[str, int], negatives: tuple[str, ...]) -> Pair:
    for text in (row["query_id"], row["text_id"], *negatives):
        if text not in counts:
            raise ValueError(f"train: the text {text[:12]} of pair {row['pair_id'][:12]} has no token ids; run the stage tokens")
    return Pair(row["pair_id"], row["query_id"], row["text_id"], row["duplicate_group"], counts[row["text_id"]], negatives)
