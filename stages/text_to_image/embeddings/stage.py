"""The stage `embeddings`: encode every distinct text once, so that no later stage loads the text encoder."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.text_to_image import CAPTIONS, EMBEDDINGS
from stages.models.family import Family, TextEncoder
from stages.models.text.encoder import Embedding, widen
from stages.models.weights import reading
from stages.run import Run
from stages.settings import several
from stages.stage import Stage
from stages.text_to_image.embeddings.config import EmbeddingsConfig
from stages.text_to_image.embeddings.memory import choose_plan, forecast
from stages.text_to_image.stored_embeddings import INT8, pack
from stages.tuner.blockwise.device import limit_command_buffers, live_memory_limit, memory_budget
from stages.tuner.weights import pack_if_possible

Row = dict[str, Any]


def wanted_embeddings(run: Run[EmbeddingsConfig]) -> pa.Table:
    ids = pc.unique(run.inputs.rows(CAPTIONS)["caption_id"])
    return pa.table({"caption_id": ids.take(pc.sort_indices(ids))})


def foreseen_embeddings(run: Run[EmbeddingsConfig]) -> pa.Table:
    """Of texts that are not encoded yet, the ids and the most rows."""
    known = set(run.output.stored["caption_id"].to_pylist())
    nothing: Row = {field.name: None for field in EMBEDDINGS.stored}
    wanted = wanted_embeddings(run)["caption_id"].to_pylist()
    rows = [nothing | {"caption_id": each, "shape": [run.needs["family"].text_tokens, 1]} for each in wanted if each not in known]
    fields = [field.with_nullable(True) for field in EMBEDDINGS.stored]
    return pa.concat_tables([run.output.stored.cast(pa.schema(fields)), pa.Table.from_pylist(rows, schema=pa.schema(fields))])


def encode_embeddings(run: Run[EmbeddingsConfig]) -> Iterator[pa.RecordBatch]:
    """Raises ValueError if a value of an embedding is not finite."""
    pending: list[str] = run.output.pending["caption_id"].to_pylist()
    captions: dict[str, list[Row]] = defaultdict(list)
    for row in run.inputs.rows(CAPTIONS).select(["caption_id", "text", "role", "origin"]).to_pylist():
        captions[row["caption_id"]].append(row)
    ids, states = iter(pending), len(run.needs["family"].text_layers)
    done = 0
    for batch in encode_texts(run, [captions[caption_id][0]["text"] for caption_id in pending]):
        rows = []
        for embedding in batch:
            caption_id, done = next(ids), done + 1
            if embedding.dropped:
                rows_of = captions[caption_id]
                first, more = rows_of[0], f" and {len(rows_of) - 1} more" if len(rows_of) > 1 else ""
                where = first["origin"] or ("a preview prompt" if first["role"] == "preview" else "a caption")
                run.report.say(
                    f"{where}{more}: the caption is {several(embedding.dropped, 'token')} too long for the text encoder, "
                    f'which reads {embedding.tokens}; the end is cut off: "{" ".join(first["text"].split())[:50]}..."'
                )
            rows.append(_row(caption_id, embedding, run.config.stored, states))
            run.report.progress(done, len(pending), "texts")
        yield EMBEDDINGS.record_batch(rows)


def encode_texts(run: Run[EmbeddingsConfig], texts: Sequence[str]) -> Iterator[list[Embedding]]:
    """In batches of [embeddings] batch_size; ends early if the user asks to stop. ValueError if memory does not suffice."""
    if not texts:
        return
    limit_command_buffers()  # before the first MLX operation
    family = run.needs["family"]
    family.require("text_encoder")  # before its weights are looked for
    path, tokenizer = run.needs["text_encoder"], run.needs["tokenizer"]
    by_layer, memory = choose_plan(run.config, family, path, memory_budget())
    with reading("the text encoder", run.report.note):
        encoder = run.reuse("text encoder", lambda: load_encoder(family, path, tokenizer, run.config, by_layer))
    try:
        with live_memory_limit(memory.live):
            for start in range(0, len(texts), run.config.batch_size):
                if run.report.stop():
                    return
                yield encoder.encode(list(texts[start : start + run.config.batch_size]))
    finally:
        del encoder
        gc.collect()
        mx.clear_cache()


def load_encoder(family: Family, weights: Path, tokenizer: Path, config: EmbeddingsConfig, by_layer: bool = False) -> TextEncoder:
    arrange = None if config.bits == 16 else lambda name, weight: pack_if_possible(weight, config.bits)
    found: TextEncoder = family.architecture.load_text_encoder(weights, tokenizer, family, config.precision, arrange, by_layer)
    return found


def _row(caption_id: str, embedding: Embedding, stored: str, states: int) -> Row:
    # Mean, deviation and magnitude leave padding out.
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


STAGE = Stage(
    reads=(CAPTIONS,),
    writes=EMBEDDINGS,
    unit="text",
    config=EmbeddingsConfig,
    needs=("family", "text_encoder", "tokenizer"),
    wants=wanted_embeddings,
    foresee=foreseen_embeddings,
    run=encode_embeddings,
    forecast=forecast,
)
