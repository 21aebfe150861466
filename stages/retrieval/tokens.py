"""The stage `tokens`: token ids of every document and every query, so that training and encoding never tokenise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from schemas.retrieval import PAIRS, TOKENS, UNITS
from stages.memory import Forecast, Outlook
from stages.retrieval import texts
from stages.retrieval.encoder import TextTokenizer
from stages.retrieval.memory import counts
from stages.retrieval.texts import Row
from stages.run import Run
from stages.settings import COUNT, Section, runtime, selects, setting
from stages.stage import Stage

ID_BYTES = 4  # of a stored token id
LONGEST = 4096  # tokens: the memory of attention grows with the square of the length


@dataclass(frozen=True)
class TokensConfig(Section):
    query_tokens: int = setting(
        32, f"tokens of a query at most, end token included; at most {LONGEST}", unit="tokens", bounds=(2, LONGEST)
    )
    document_tokens: int = setting(
        256, f"tokens of a document at most, end token included; at most {LONGEST}", unit="tokens", bounds=(2, LONGEST)
    )
    hard: bool = selects(False, "also tokenise the documents of pairs without their names, for the hard mode of the evaluation")
    batch_size: int = runtime(256, "texts per record batch, which a kill can lose", unit="texts", bounds=COUNT)


def wanted_tokens(run: Run[TokensConfig]) -> pa.Table:
    """`text_id` and `role` of every distinct text, by role and text_id."""
    rows = [{"text_id": text_id, **row} for text_id, row in run.once(_texts).items()]
    return TOKENS.select(sorted(rows, key=lambda row: (row["role"], row["text_id"])), ("text_id", "role"))


def _texts(run: Run[TokensConfig]) -> dict[str, Row]:
    """text_id -> role and text. With `hard`, documents of pairs come a second time, without their names."""
    units = run.inputs.rows(UNITS).select(["unit_id", "name", "text", "text_id"]).to_pylist()
    pairs = texts.used_pairs(run.inputs.rows(PAIRS))
    found = {row["text_id"]: {"role": "document", "text": row["text"]} for row in units}
    found |= {row["query_id"]: {"role": "query", "text": row["query"]} for row in pairs}
    if run.config.hard:
        paired = {row["unit_id"] for row in pairs}
        for text in (texts.without_name(row["text"], row["name"]) for row in units if row["unit_id"] in paired):
            found[texts.text_id("document", text)] = {"role": "document", "text": text}
    return found


def encode_tokens(run: Run[TokensConfig]) -> Iterator[pa.RecordBatch]:
    pending = run.output.pending.to_pylist()
    if not pending:
        return
    known = run.once(_texts)
    tokenizer = TextTokenizer(run.needs["tokenizer"], lower_case=run.needs["family"].lower_case)
    longest = {"query": run.config.query_tokens, "document": run.config.document_tokens}
    for some in run.report.batches(pending, run.config.batch_size, "texts"):
        rows = []
        for row, ids in zip(some, tokenizer.encode([known[row["text_id"]]["text"] for row in some]), strict=True):
            kept = tokenizer.cut(ids, longest[row["role"]])
            unknown = sum(each == tokenizer.unknown for each in kept)
            numbers = {"count": len(kept), "truncated": len(ids) - len(kept), "unknown": unknown}
            rows.append({**row, **numbers, "ids_shape": [len(kept)], "ids": np.array(kept, np.int32)})
        yield TOKENS.record_batch(rows)


def forecast(outlook: Outlook) -> Forecast:
    together = np.concatenate(counts(outlook))
    known = outlook.rows(TOKENS) is not None
    return Forecast(0, int(ID_BYTES * together.mean()), how="" if known else f"at most {together.max()} tokens a text")


STAGE = Stage(
    reads=(UNITS, PAIRS),
    writes=TOKENS,
    unit="text",
    config=TokensConfig,
    needs=("family", "tokenizer"),
    wants=wanted_tokens,
    run=encode_tokens,
    forecast=forecast,
    model=lambda config: False,
)
