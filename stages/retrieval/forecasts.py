"""Forecasts of the stages that encode texts or search their vectors: memory and disk, from shapes and stored counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from schemas.retrieval.pairs import PAIRS
from schemas.retrieval.tokens import TOKENS
from schemas.retrieval.units import UNITS
from stages.forecast import Forecast, Outlook

if TYPE_CHECKING:
    from stages.models.t5.model import T5Config

ID_BYTES = 4  # bytes of a stored token id
VALUE_BYTES = 2  # bytes of a stored value of a token vector
SCORE_BYTES = 4
# Bytes per byte of a block's Linear inputs and outputs, and per byte of its attention scores, while a text is encoded. Measured
# on a CPU. The first pair is for devices that compute exp step by step (`elementwise.slow_exp`), the second for all others.
WORK = ((1.05, 5.0), (2.0, 3.0))
INDEX_BYTES, WORDS = 20_000, 0.85  # of the full-text index: bytes in all, and per byte of the documents' words; about


def counts(outlook: Outlook) -> tuple[np.ndarray, np.ndarray]:
    """Token counts of all queries and of all documents; the largest that [tokens] allows, while the table lacks them."""
    config, rows = outlook.sections["tokens"], outlook.rows(TOKENS)
    if rows is None:
        return np.array([config.query_tokens]), np.array([config.document_tokens])
    roles, found = rows["role"].to_numpy(), rows["count"].to_numpy()
    queries, documents = found[roles == "query"], found[roles == "document"]
    return (
        queries if len(queries) else np.array([config.query_tokens]),
        documents if len(documents) else np.array([config.document_tokens]),
    )


def encoder_sizes(outlook: Outlook) -> T5Config:
    """From config.json beside the weights, or the family's record. Raises ValueError if neither is there."""
    family, folder = outlook.family, outlook.weights("encoder")
    if folder is not None:
        found: T5Config = family.architecture.sizes(folder)
        return found
    if not family.sizes:
        raise ValueError("the sizes of the encoder are known once it is downloaded")
    from stages.models.t5.model import T5Config as Sizes

    return Sizes.from_dict(family.sizes, family.sizes.get("dimensions", Sizes.dimensions))


def encoding_bytes(outlook: Outlook, precision: str, tokens: int) -> int:
    """Peak memory of encoding one text: weights, adapter, and the work of the largest block."""
    import mlx.core as mx

    from stages.models.attention import slow_exp
    from stages.retrieval.encoder import MULTIPLE
    from stages.tuner.blockwise import planner
    from stages.tuner.blockwise.device import blocks_in_flight
    from stages.tuner.step import choose_targets

    sizes, dtype = encoder_sizes(outlook), getattr(mx, precision)
    model = outlook.family.architecture.meta_encoder(sizes, dtype)
    length = -(-tokens // MULTIPLE) * MULTIPLE
    inputs = {"ids": [mx.zeros((1, length), mx.int32)], "real": [mx.ones((1, length), mx.bool_)]}
    weights = planner.weight_bytes(((shape, 16) for shape in sizes.shapes().values()), dtype.size)
    targets = choose_targets(model.linears(), outlook.sections["train"])
    found = planner.estimate(model, inputs, weights, targets, 0)
    traffic, per_score = WORK[0 if slow_exp(mx.zeros(0, dtype)) else 1]
    scores = sizes.num_heads * length * length * dtype.size
    work = blocks_in_flight() * traffic * max(found.linear_traffic) + per_score * scores
    return int(weights + found.adapter + found.block_input + work)


def forecast_tokens(outlook: Outlook) -> Forecast:
    together = np.concatenate(counts(outlook))
    known = outlook.rows(TOKENS) is not None
    return Forecast(0, int(ID_BYTES * together.mean()), plan="" if known else f"at most {together.max()} tokens a text")


def forecast_vectors(outlook: Outlook) -> Forecast:
    """Advises bfloat16 if float32 is chosen and only bfloat16 fits."""
    config, (queries, documents) = outlook.sections["vectors"], counts(outlook)
    longest = int(max(queries.max(), documents.max()))
    peak = encoding_bytes(outlook, config.precision, longest)
    held = _held_out(outlook)
    share = min(1.0, held / len(queries)) if held is not None else 1.0  # queries of training pairs get no vectors
    texts = len(documents) + share * len(queries)
    mean = (documents.sum() + share * queries.sum()) / texts
    row_bytes = int(VALUE_BYTES * encoder_sizes(outlook).dimensions * mean)
    advice = ""
    if peak > outlook.budget and config.precision == "float32" and encoding_bytes(outlook, "bfloat16", longest) <= outlook.budget:
        advice = '[vectors] precision = "bfloat16"'
    return Forecast(peak, row_bytes, plan=f"{config.precision}, at most {longest} tokens", remedy=advice)


def forecast_negatives(outlook: Outlook) -> Forecast | None:
    """One document being encoded, and the vectors of all; None without an encoder."""
    config, (_, documents) = outlook.sections["negatives"], counts(outlook)
    if not config.encoder:
        return None
    vectors = VALUE_BYTES * encoder_sizes(outlook).dimensions * int(documents.sum())
    peak = encoding_bytes(outlook, "float32", int(documents.max())) + vectors
    advice = '[negatives] encoder = ""' if peak > outlook.budget else ""
    return Forecast(peak, plan="vectors of all documents in memory", remedy=advice)


def forecast_index(outlook: Outlook) -> Forecast | None:
    """The matrix, the full-text index and, for a large project, the partitioned index; None if the tables are not built."""
    units, rows = outlook.rows(UNITS), outlook.rows(TOKENS)
    if units is None or rows is None:
        return None
    lengths = dict(zip(rows["text_id"].to_pylist(), rows["count"].to_pylist(), strict=True))
    tokens = sum(lengths.get(text_id, 0) for text_id in units["text_id"].to_pylist())
    partitioned = tokens > outlook.sections["index"].exact_tokens
    vectors = VALUE_BYTES * encoder_sizes(outlook).dimensions * tokens
    words = sum(len(text.encode()) for text in units["words"].to_pylist())
    plan = f"{tokens} vectors" + (", partitioned" if partitioned else "")
    return Forecast(0, file_bytes=vectors * (1 + partitioned) + INDEX_BYTES + int(WORDS * words), plan=plan)


def forecast_ranks(outlook: Outlook) -> Forecast | None:
    """A lexical and a semantic score for every query and document; None if the tables are not built."""
    units, held = outlook.rows(UNITS), _held_out(outlook)
    if units is None or held is None:
        return None
    candidates = units.num_rows
    if outlook.sections["ranks"].candidates == "pairs":
        candidates = sum(reason is None for reason in _pairs(outlook)["rejected"])
    return Forecast(2 * SCORE_BYTES * held * candidates, plan=f"{held} queries, {candidates} documents")


def _held_out(outlook: Outlook) -> int | None:
    """Usable pairs of valid and test; None if the table is not built."""
    pairs = _pairs(outlook)
    splits = zip(pairs["rejected"], pairs["split"], strict=True)
    return sum(reason is None and split != "train" for reason, split in splits) if pairs["split"] else None


def _pairs(outlook: Outlook) -> dict[str, list[Any]]:
    rows = outlook.rows(PAIRS)
    names = ("rejected", "split")
    return {name: [] if rows is None else rows[name].to_pylist() for name in names}
