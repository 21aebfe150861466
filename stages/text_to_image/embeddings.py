"""embeddings: every distinct text, encoded, so that nothing after this stage loads the text encoder."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.embeddings import EMBEDDINGS
from stages.models.protocols import TextEncoder
from stages.models.text.encoder import Embedding, widen
from stages.settings import runtime, setting
from stages.stage import Stage, StageContext

MOST = 64  # texts in a batch: 64 of the widest family's rows are 1 GB


@dataclass(frozen=True)
class EmbeddingsConfig:
    """[embeddings]: how texts are encoded."""

    precision: Literal["bfloat16", "float32"] = setting(
        "bfloat16", "what the text encoder computes in; bfloat16 as it was released, float32 where no GPU is (far faster there)"
    )
    batch_size: int = runtime(8, "texts per write; each is encoded by itself, so values do not depend on it")

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= MOST:
            raise ValueError(f"batch_size: {self.batch_size} is not between 1 and {MOST}")


def wanted(ctx: StageContext) -> pa.Table:
    """One row per distinct text, whatever it is for."""
    ids = pc.unique(ctx.rows(CAPTIONS)["caption_id"])
    return pa.table({"caption_id": ids.take(pc.sort_indices(ids))})


def encode_embeddings(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Batches of encoded texts; the text encoder is loaded only if one is missing, and let go at the end."""
    pending: list[str] = ctx.pending["caption_id"].to_pylist()
    if not pending:
        return
    family = ctx.need("family")
    family.require("text_encoder")
    captions = _captions(ctx.rows(CAPTIONS))
    encoder = family.architecture.load_text_encoder(ctx.need("text_encoder"), ctx.need("tokenizer"), family, ctx.config.precision)
    try:
        for start in range(0, len(pending), ctx.config.batch_size):
            if ctx.stop():
                return
            yield _batch(ctx, encoder, pending, start, captions)
    finally:
        del encoder
        gc.collect()
        mx.clear_cache()


def _captions(rows: pa.Table) -> dict[str, list[dict[str, Any]]]:
    """The rows of each text."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows.select(["caption_id", "text", "role", "origin"]).to_pylist():
        found[row["caption_id"]].append(row)
    return found


def _batch(
    ctx: StageContext, encoder: TextEncoder, pending: list[str], start: int, captions: dict[str, list[dict[str, Any]]]
) -> pa.RecordBatch:
    ids = pending[start : start + ctx.config.batch_size]
    rows = []
    for place, (caption_id, made) in enumerate(zip(ids, encoder.encode([captions[i][0]["text"] for i in ids]), strict=True)):
        if made.dropped:
            ctx.say(_too_long(captions[caption_id], made))
        rows.append(_row(caption_id, made))
        ctx.progress(start + place + 1, len(pending), "texts")
    return EMBEDDINGS.table(rows).combine_chunks().to_batches()[0]


def _row(caption_id: str, made: Embedding) -> dict[str, Any]:
    real = widen(made.words[: made.tokens])
    if not np.isfinite(real).all():
        raise ValueError(
            f"the text encoder gave values that are not finite for caption {caption_id[:12]}: are its weights whole? "
            'If they are, set precision = "float32" in [embeddings]'
        )
    return {
        "caption_id": caption_id,
        "tokens": made.tokens,
        "dropped_tokens": made.dropped,
        "shape": list(made.words.shape),
        "dtype": "bfloat16",
        "mean": float(real.mean(dtype=np.float64)),
        "std": float(real.std(dtype=np.float64)),
        "absmax": float(np.abs(real).max()),
        "tensor": made.words.ravel(),
    }


def _too_long(rows: list[dict[str, Any]], made: Embedding) -> str:
    """Which caption is cut, and by how much."""
    first = rows[0]
    where = first["origin"] or ("a preview prompt" if first["role"] == "preview" else "a caption")
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return (
        f"{where}{more}: the caption is {made.dropped} tokens too long, of {made.tokens} that the text encoder reads; "
        f'its end is not used: "{first["text"][:50]}..."'
    )


STAGE = Stage(
    reads=(CAPTIONS,),
    writes=EMBEDDINGS,
    config=EmbeddingsConfig,
    needs=("family", "text_encoder", "tokenizer"),
    wants=wanted,
    run=encode_embeddings,
)
