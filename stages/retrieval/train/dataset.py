"""Which pairs a run trains on, and which it is measured by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schemas.retrieval.negatives import NEGATIVES
from schemas.retrieval.pairs import PAIRS
from schemas.retrieval.tokens import TOKENS
from stages.retrieval.train.config import TrainConfig, ValidationConfig
from stages.stage import StageContext
from stages.tuner import draws

Row = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """A query and its own document, with hard negatives (documents that search ranks high, but that do not answer the
    query). `query_id`, `text_id` (the own document) and `negatives` are keys of the table `tokens`. The hardest
    negative comes first. `length` is the number of tokens of the own document. `group` names the pair's duplicate
    group. Pairs with equal queries or equal documents are in one group. Documents of the same group are never negatives
    of this query.
    """

    pair_id: str
    query_id: str
    text_id: str
    group: str
    length: int
    negatives: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """Returns the keys of all texts of the pair. They are the query, the pair's own document and its hard
        negatives, in this order.
        """
        return self.query_id, self.text_id, *self.negatives


@dataclass(frozen=True)
class Dataset:
    """The pairs of a run. A pair is a query and the document that answers the query. `trained` are the training pairs,
    and `held` are the held-out pairs for validation. Both are sorted by `pair_id`. `counts` maps the `text_id` of each
    text, query or document, to its number of tokens. `groups` maps the `text_id` of a pair's document to the name of
    the pair's duplicate group. Pairs with equal queries or equal documents are in one duplicate group.

    Documents that answer no query are not in `groups`.
    """

    trained: tuple[Pair, ...]
    held: tuple[Pair, ...]
    counts: dict[str, int]
    groups: dict[str, str]

    @property
    def longest(self) -> tuple[int, int]:
        """The number of tokens of the longest query and of the longest document, as a pair. Hard negatives count as
        documents.
        """
        pairs = (*self.trained, *self.held)
        documents = [text for pair in pairs for text in pair.texts[1:]]
        return max(self.counts[pair.query_id] for pair in pairs), max(self.counts[text] for text in documents)


def load_dataset(ctx: StageContext, config: TrainConfig) -> Dataset:
    """Read the tables, and return the training pairs and validation pairs of a run as a `Dataset`. A pair is a query
    and its right answer. `ctx` is the stage's context: its input tables and settings. `config` holds the settings
    [train]. Raises ValueError if there are too few pairs, or if a text has no token ids. Raises it too if hard
    negatives are asked for, but the table `negatives` is empty.

    At least as many training pairs are needed as a batch has. If validation is on, it needs at least 2 pairs.
    """
    rows = [row for row in ctx.rows(PAIRS).to_pylist() if row["rejected"] is None]
    counts = dict(zip(*(ctx.rows(TOKENS)[name].to_pylist() for name in ("text_id", "count")), strict=True))
    groups = {row["text_id"]: row["duplicate_group"] for row in rows}
    by_split: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: str(row["pair_id"])):
        by_split.setdefault(row["split"], []).append(row)
    training = by_split.get("train", [])
    if not training:
        raise ValueError(f"train: there are no pairs to train on: of {len(rows)} usable pairs none is in the split train")
    if len(training) < config.batch_size:
        raise ValueError(f"train.batch_size must be <= {len(training)}, the number of training pairs, got {config.batch_size}")
    negatives = _negatives(ctx, config) if config.hard_negatives else {}
    trained = tuple(_pair(row, counts, negatives.get(row["pair_id"], ())) for row in training)
    held = _held(config.validation, config.seed, by_split.get("valid", []), counts) if config.validation else ()
    return Dataset(trained, held, counts, groups)


def _negatives(ctx: StageContext, config: TrainConfig) -> dict[str, tuple[str, ...]]:
    """Return the hard negatives of each training pair, as a dict from `pair_id` to text_ids, the hardest first. A hard
    negative is a document that search ranks high and that does not answer the query. `ctx` is the stage's context: its
    input tables and settings. `config` holds the settings [train]. Its `hard_negatives` is the largest number per pair.
    Pairs without hard negatives are left out. Raises ValueError if the table `negatives` is empty.
    """
    found: dict[str, list[str]] = {}
    for row in sorted(ctx.rows(NEGATIVES).to_pylist(), key=lambda row: (row["pair_id"], row["position"])):
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
