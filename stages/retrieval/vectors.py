"""The stage `vectors`: a vector per token of documents, and of valid and test queries, by base and newest adapter."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.retrieval import PAIRS, TOKENS, TRAIN, VECTORS
from stages.hashing import file_sha256
from stages.memory import Forecast, Memory, Outlook, Settings, cheapest
from stages.retrieval.memory import counts, encoder_sizes, encoding_memory, held_out_pairs
from stages.retrieval.search import codes
from stages.retrieval.texts import BASE, HELD_OUT, Row, used_pairs, vector_id
from stages.run import Run
from stages.settings import COUNT, Section, runtime, selects, setting
from stages.stage import Stage
from stages.tuner.checkpoint import ADAPTER


@dataclass(frozen=True)
class VectorsConfig(Section):
    precision: Literal["float32", "bfloat16"] = setting(
        "float32", "dtype that the encoder computes in: bfloat16 is faster on a GPU, float32 far faster on a CPU"
    )
    strength: float = setting(
        1.0,
        "share of the adapter's change that is used, 0 to 1; a part can find more in unseen code",
        unit="share",
        unrecorded=(1.0,),
        bounds=(0.0, 1.0),
    )
    base: bool = selects(True, "also encode with the untuned base, so that the evaluation compares the tuned encoder with it")
    batch_size: int = runtime(
        64, "texts per record batch, which a kill can lose; texts are encoded one by one", unit="texts", bounds=COUNT
    )


def wanted_vectors(run: Run[VectorsConfig]) -> pa.Table:
    held_out = pa.array(sorted({row["query_id"] for row in used_pairs(run.inputs.rows(PAIRS), *HELD_OUT)}), pa.string())
    tokens = run.inputs.rows(TOKENS).select(["text_id", "role"]).sort_by("text_id")
    texts = tokens.filter(pc.or_(pc.equal(tokens["role"], "document"), pc.is_in(tokens["text_id"], held_out)))
    schema = VECTORS.select([], ("vector_id", "encoder", "text_id", "role")).schema
    found = [schema.empty_table()]
    for name in run.once(encoders):
        # 135,000 ids take 0.4 s to make.
        stored = run.output.stored.filter(pc.field("encoder") == name)
        known = stored["vector_id"].take(pc.index_in(texts["text_id"], stored["text_id"].combine_chunks()))
        new = texts["text_id"].filter(pc.is_null(known)).to_pylist()
        ids = pc.replace_with_mask(
            known.combine_chunks(),
            pc.is_null(known).combine_chunks(),
            pa.array([vector_id(name, each) for each in new], pa.string()),
        )
        encoder = pa.repeat(pa.scalar(name), len(ids))
        found.append(pa.table([ids, encoder, texts["text_id"], texts["role"]], schema=schema))
    return pa.concat_tables(found)


def encoders(run: Run[VectorsConfig]) -> dict[str, Path | None]:
    """Name -> adapter file: "base" -> None, and the sha256 of the trained one. Raises ValueError if there are none."""
    adapter = run.inputs.files(TRAIN) / ADAPTER
    tuned: dict[str, Path | None] = {file_sha256(adapter): adapter} if adapter.is_file() else {}
    if not tuned and not run.config.base:
        raise ValueError("vectors.base must be true: no adapter is trained; run make train, or leave out base = false")
    return ({BASE: None} if run.config.base else {}) | tuned


def encode_vectors(run: Run[VectorsConfig]) -> Iterator[pa.RecordBatch]:
    """All texts of one encoder, then those of the next. No weights are loaded if nothing is pending."""
    from stages.retrieval.encoder import text_encoder

    pending, config, done = run.output.pending.to_pylist(), run.config, 0
    for name, adapter in run.once(encoders).items() if pending else ():
        own = [row for row in pending if row["encoder"] == name]
        if not own or run.report.stop():
            continue
        tokens = run.inputs.tensors(TOKENS)
        with text_encoder(run, tokens, adapter, precision=config.precision, strength=config.strength) as encode:
            for start in range(0, len(own), config.batch_size):
                if run.report.stop():
                    return
                some = own[start : start + config.batch_size]
                tokens.ahead(row["text_id"] for row in some)
                yield VECTORS.record_batch(_row(row, encode(row["text_id"], row["role"])) for row in some)
                done += len(some)
                run.report.progress(done, len(pending), "texts")


def _row(row: Row, vectors: np.ndarray) -> Row:
    """Raises ValueError if a value is not finite."""
    if not np.isfinite(vectors).all():
        raise ValueError(
            f"the encoder gave values that are not finite for text {row['text_id'][:12]}: set vectors.precision to float32"
        )
    stored = codes.pack(vectors)
    return {**row, "count": len(vectors), "vectors_shape": list(stored.shape), "vectors": stored.ravel()}


def forecast(outlook: Outlook) -> Forecast:
    """Advises bfloat16 if float32 is chosen and only bfloat16 fits."""
    config, (queries, documents) = outlook.sections["vectors"], counts(outlook)
    longest = int(max(queries.max(), documents.max()))

    def memory(settings: Settings) -> Memory:
        return encoding_memory(outlook, outlook.changed(settings).sections["vectors"].precision, longest)

    def peak(settings: Settings) -> int:
        return memory(settings).footprint

    held = held_out_pairs(outlook)
    share = min(1.0, held / len(queries)) if held is not None else 1.0  # queries of training pairs get no vectors
    mean = (documents.sum() + share * queries.sum()) / (len(documents) + share * len(queries))
    row_bytes = int(encoder_sizes(outlook).dimensions * mean * codes.BYTES / codes.VALUES)
    changes = [{"vectors": {"precision": "bfloat16"}}] if config.precision == "float32" else []
    needed, remedy = memory({}), functools.partial(cheapest, peak, outlook.budget, changes)
    how = f"{config.precision}, at most {longest} tokens"
    return Forecast(needed.footprint, row_bytes, how=how, find_remedy=remedy, arrays=needed.peak)


STAGE = Stage(
    reads=(TOKENS, PAIRS),
    writes=VECTORS,
    unit="text",
    config=VectorsConfig,
    needs=("family", "encoder"),
    optional=(TRAIN,),
    wants=wanted_vectors,
    run=encode_vectors,
    forecast=forecast,
    version=2,  # 2: 4 bits a value instead of 16
)
