"""What the forecasts of several stages need: lengths of texts, sizes of the encoder, memory of encoding one text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from schemas.retrieval import PAIRS, TOKENS
from stages.memory import T5_WORK, Memory, Outlook
from stages.retrieval.texts import HELD_OUT, used_pairs

if TYPE_CHECKING:
    from stages.models.t5.model import T5Config

VALUE_BYTES = 2  # bytes of a value of a token vector in memory


def counts(outlook: Outlook) -> tuple[np.ndarray, np.ndarray]:
    """Token counts of all queries and of all documents; the largest that [tokens] allows, while the table lacks them."""
    config, rows = outlook.sections["tokens"], outlook.rows(TOKENS)
    most = np.array([config.query_tokens]), np.array([config.document_tokens])
    if rows is None:
        return most
    roles, found = rows["role"].to_numpy(), rows["count"].to_numpy()
    queries, documents = found[roles == "query"], found[roles == "document"]
    return queries if len(queries) else most[0], documents if len(documents) else most[1]


def held_out_pairs(outlook: Outlook) -> int | None:
    rows = outlook.rows(PAIRS)
    return len(used_pairs(rows, *HELD_OUT)) if rows is not None and rows.num_rows else None


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


def encoding_memory(outlook: Outlook, precision: str, tokens: int) -> Memory:
    """Of encoding one text: weights, adapter, and the work of the largest block."""
    import mlx.core as mx

    from stages.models.attention import slow_exp
    from stages.retrieval.encoder import MULTIPLE
    from stages.tuner.blockwise.device import blocks_in_flight
    from stages.tuner.memory import trace, weight_bytes
    from stages.tuner.step import choose_targets

    sizes, dtype = encoder_sizes(outlook), getattr(mx, precision)
    model = outlook.family.architecture.meta_encoder(sizes, dtype)
    length = -(-tokens // MULTIPLE) * MULTIPLE
    inputs = {"ids": [mx.zeros((1, length), mx.int32)], "real": [mx.ones((1, length), mx.bool_)]}
    weights = weight_bytes(((shape, 16) for shape in sizes.shapes().values()), dtype.size)
    targets = choose_targets(model.linears(), outlook.sections["train"]) if outlook.family.trained else []
    blocks = trace(model, inputs, targets, weights=weights)
    traffic, per_score = T5_WORK[0 if slow_exp(mx.zeros(0, dtype)) else 1]
    scores = sizes.num_heads * length * length * dtype.size
    work = blocks_in_flight() * traffic * max(blocks.traffic) + per_score * scores
    return Memory(blocks.held, int(blocks.block_input + work))
