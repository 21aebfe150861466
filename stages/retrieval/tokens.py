"""The stage `tokens`: token ids of every document and every query, so that training and encoding never tokenise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
    units = run.inputs.rows(UNITS, ("text_id", "title_id"))
    titles = units["title_id"].filter(pc.not_equal(units["title_id"], ""))
    documents = pa.chunked_array([*units["text_id"].chunks, *titles.chunks], pa.string()).unique()
    others = run.once(_others)
    made = [(row["role"], text_id) for text_id, row in others.items()]
    ids = pa.concat_arrays([documents.cast(pa.string()), pa.array([text_id for _, text_id in made], pa.string())])
    roles = pa.array(["document"] * len(documents) + [role for role, _ in made], pa.string())
    rows = pa.table([ids, roles], schema=TOKENS.select([], ("text_id", "role")).schema)
    # A document without its name may be another function's own text.
    unique = rows.group_by(["text_id", "role"], use_threads=False).aggregate([])
    return unique.sort_by([("role", "ascending"), ("text_id", "ascending")]).cast(rows.schema)


def _others(run: Run[TokensConfig]) -> dict[str, Row]:
    """text_id -> role and text, of queries and, with `hard`, of the documents of pairs without their names."""
    pairs = texts.used_pairs(run.inputs.rows(PAIRS))
    found = {row["query_id"]: {"role": "query", "text": row["query"]} for row in pairs}
    if run.config.hard:
        paired = pa.array([row["unit_id"] for row in pairs], pa.string())
        units = run.inputs.rows(UNITS, ("unit_id", "name", "text"))
        for row in units.filter(pc.is_in(units["unit_id"], paired)).to_pylist():
            text = texts.without_name(row["text"], row["name"])
            found[texts.text_id("document", text)] = {"role": "document", "text": text}
    return found


def _texts(run: Run[TokensConfig], wanted: pa.ChunkedArray) -> dict[str, str]:
    """text_id -> text, of the `wanted` ids."""
    found = dict[str, str]()
    for key, text in (("title_id", "title"), ("text_id", "text")):
        some = run.inputs.rows(UNITS, (key, text), (key, wanted.combine_chunks()))
        found |= dict(zip(some[key].to_pylist(), some[text].to_pylist(), strict=True))
    return found | {text_id: row["text"] for text_id, row in run.once(_others).items()}


def encode_tokens(run: Run[TokensConfig]) -> Iterator[pa.RecordBatch]:
    pending = run.output.pending.to_pylist()
    if not pending:
        return
    known = _texts(run, run.output.pending["text_id"])
    folder, family = run.needs["tokenizer"], run.needs["family"]
    tokenizer = TextTokenizer(folder, lower_case=family.lower_case, reading=family.architecture.reading(folder))
    longest = {"query": run.config.query_tokens, "document": run.config.document_tokens}
    for some in run.report.batches(pending, run.config.batch_size, "texts"):
        rows = []
        for row, ids in zip(some, tokenizer.encode([known[row["text_id"]] for row in some]), strict=True):
            kept = tokenizer.cut(ids, longest[row["role"]], row["role"])
            unknown = sum(each == tokenizer.unknown for each in kept)
            numbers = {"count": len(kept), "truncated": max(0, len(ids) - len(kept)), "unknown": unknown}
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
