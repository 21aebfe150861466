"""The stage `embeddings`: encode every distinct text once, so that no later stage loads the text encoder."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.embeddings import EMBEDDINGS
from stages.models.protocols import TextEncoder
from stages.models.reading import reading
from stages.models.text.encoder import Embedding, widen
from stages.stage import Stage, StageContext
from stages.text_to_image.embeddings.config import EmbeddingsConfig
from stages.text_to_image.embeddings.memory_plan import choose_plan, forecast, load_encoder
from stages.text_to_image.stored_embeddings import INT8, pack
from stages.tuner.blockwise.device import live_memory_limit, memory_budget

Row = dict[str, Any]


def wanted_embeddings(ctx: StageContext) -> pa.Table:
    """Return a table with one row per distinct text of the table `captions`. The only column is `caption_id`, the
    sha256 of the text. The rows are sorted by `caption_id`. `ctx` is the stage's context, with its input tables.
    """
    ids = pc.unique(ctx.rows(CAPTIONS)["caption_id"])
    return pa.table({"caption_id": ids.take(pc.sort_indices(ids))})


def encode_embeddings(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Encode the pending texts, and yield record batches of the table `embeddings`. A text is pending if its embedding
    is not stored yet. If no text is pending, the text encoder is not loaded. `ctx` is the stage's context: its tables
    and settings. If the user asks to stop, end early. Raises ValueError if a value of an embedding is not finite.
    """
    pending: list[str] = ctx.pending["caption_id"].to_pylist()
    if not pending:
        return
    family = ctx.need("family")
    family.require("text_encoder")
    captions = _rows_by_text(ctx.rows(CAPTIONS))
    path = ctx.need("text_encoder")
    plan = choose_plan(ctx.config, family, path, memory_budget())
    tokenizer = ctx.need("tokenizer")
    with reading("the text encoder", ctx.note):
        encoder = ctx.reuse("text encoder", lambda: load_encoder(family, path, tokenizer, ctx.config, plan.by_layer))
    try:
        with live_memory_limit(plan.live_bytes):
            for start in range(0, len(pending), ctx.config.batch_size):
                if ctx.stop():
                    return
                yield _batch(ctx, encoder, pending, start, captions)
    finally:
        del encoder
        gc.collect()
        mx.clear_cache()


def _rows_by_text(rows: pa.Table) -> dict[str, list[Row]]:
    """Return the rows of the table `captions` by text, as a dict from `caption_id` to a list of rows. A `caption_id` is
    the sha256 of a text. A row is a dict of `caption_id`, `text`, `role` (the use of the text) and `origin` (the file
    or setting that it is from). `rows` is the table `captions`.
    """
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows.select(["caption_id", "text", "role", "origin"]).to_pylist():
        found[row["caption_id"]].append(row)
    return found


def _batch(
    ctx: StageContext, encoder: TextEncoder, pending: list[str], start: int, captions: dict[str, list[Row]]
) -> pa.RecordBatch:
    """Encode the next texts of `pending` and return their rows as a record batch. `ctx` is the stage's context, which
    holds the settings. `encoder` is the loaded text encoder. `pending` is a list of caption_ids. `start` is the index
    of the first text in it. At most [embeddings] `batch_size` texts are encoded. `captions` maps a caption_id to its
    rows of the table `captions`.
    """
    ids = pending[start : start + ctx.config.batch_size]
    embeddings = encoder.encode([captions[caption_id][0]["text"] for caption_id in ids])
    rows = []
    for done, (caption_id, embedding) in enumerate(zip(ids, embeddings, strict=True), start + 1):
        if embedding.dropped:
            ctx.say(_too_long(captions[caption_id], embedding))
        rows.append(_row(caption_id, embedding, ctx.config.stored, len(ctx.need("family").text_layers)))
        ctx.progress(done, len(pending), "texts")
    return EMBEDDINGS.table(rows).combine_chunks().to_batches()[0]


def _row(caption_id: str, embedding: Embedding, stored: str, states: int) -> Row:
    """Return the row of the table `embeddings` for one text, as a dict from column to value. `caption_id` is the sha256
    of the text. `embedding` is its embedding. `stored` is the form of the values on disk, "bfloat16" or "int8".
    `states` is the number of hidden states in the embedding. Raises ValueError if a value is not finite.

    The row holds the values of the embedding, their mean, standard deviation and largest magnitude, and token counts.
    The mean, deviation and magnitude leave padding out.
    """
    real = widen(embedding.real)
    if not np.isfinite(real).all():
        raise ValueError(
            f"the text encoder gave values that are not finite for caption {caption_id[:12]}: "
            "set embeddings.precision to float32, or download the weights again"
        )
    words_TP = pack(embedding.words, states) if stored == INT8 else embedding.words
    return {
        "caption_id": caption_id,
        "tokens": embedding.tokens,
        "dropped_tokens": embedding.dropped,
        "shape": list(words_TP.shape),
        "dtype": stored,
        "mean": float(real.mean(dtype=np.float64)),
        "std": float(real.std(dtype=np.float64)),
        "absmax": float(np.abs(real).max()),
        "tensor": words_TP.ravel(),
    }


def _too_long(rows: list[Row], embedding: Embedding) -> str:
    """Return one line for the user about a text that was cut at its end. The line says where the text is from, and how
    many tokens were cut off. `rows` are all rows of the table `captions` that have the text. `embedding` is the
    embedding of the text.
    """
    first = rows[0]
    where = first["origin"] or ("a preview prompt" if first["role"] == "preview" else "a caption")
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return (
        f"{where}{more}: the caption is {embedding.dropped} tokens too long for the text encoder, which reads "
        f'{embedding.tokens}; the end is cut off: "{first["text"][:50]}..."'
    )


STAGE = Stage(
    reads=(CAPTIONS,),
    writes=EMBEDDINGS,
    config=EmbeddingsConfig,
    needs=("family", "text_encoder", "tokenizer"),
    wants=wanted_embeddings,
    run=encode_embeddings,
    forecast=forecast,
)
