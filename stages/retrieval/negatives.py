"""The stage `negatives`: for every training query the documents that a search ranks high although they do not answer it.

Documents of held-out pairs are left out. Training would see them as wrong answers only, and learn to rank them low.

The search is full-text search, or MaxSim with the encoder before this training: the base, or an adapter of an earlier run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from schemas.retrieval import NEGATIVES, PAIRS, TOKENS, UNITS
from stages.hashing import file_sha256, text_sha256
from stages.memory import Forecast, Outlook, Remedy
from stages.retrieval.memory import VALUE_BYTES, counts, encoder_sizes, encoding_memory
from stages.retrieval.search import lexical
from stages.retrieval.search.maxsim import TokenMatrix
from stages.retrieval.texts import BASE, Row
from stages.run import Run
from stages.settings import COUNT, NUMBER, Section, runtime, setting
from stages.stage import Stage

Search = Callable[[Row], np.ndarray]  # pair -> the score of every unit for its query, in the order of `_corpus`


@dataclass(frozen=True)
class NegativesConfig(Section):
    encoder: str = setting(
        "",
        'what ranks the documents: empty for full-text search, "base" for the untuned encoder, or the adapter file of an earlier '
        "run, relative to the project; an encoder reads every document again, which takes as long as the stage vectors",
        path=True,
    )
    count: int = setting(
        4, "hard negatives per pair; fewer if search finds fewer; 0: none", unit="documents", bounds=(0, lexical.FOUND // 2)
    )
    skip: int = setting(
        0,
        "best documents that are passed over, since some of them may answer the query too",
        unit="documents",
        bounds=(0, lexical.FOUND // 4),
    )
    max_ratio: float = setting(
        1.25,
        "a document that scores higher than this times the pair's own document is passed over: it may answer the query too",
        unit="ratio",
        bounds=(0.0, NUMBER[1]),
    )
    batch_size: int = runtime(128, "pairs per record batch, which a kill can lose", unit="pairs", bounds=COUNT)


def wanted_negatives(run: Run[NegativesConfig]) -> pa.Table:
    """`pair_id` and `position`: `count` per training pair, or as many as there are documents outside its duplicate group."""
    units, _, groups = run.once(_corpus)
    rows = [
        {"pair_id": pair["pair_id"], "position": position}
        for pair in sorted(run.once(_pairs), key=lambda pair: str(pair["pair_id"]))
        if pair["trained"]
        for position in range(min(run.config.count, len(units) - len(groups[pair["duplicate_group"]])))
    ]
    return NEGATIVES.select(rows, NEGATIVES.key)


def snapshot(run: Run[NegativesConfig]) -> pa.Table:
    # Held-out units are not in it: a change of theirs changes no row.
    found = {row["unit_id"]: text_sha256(row["words"]) for row in run.once(_corpus)[0]}
    found |= {row["pair_id"]: f"{row['unit_id']} {row['duplicate_group']} {row['trained']}" for row in run.once(_pairs)}
    if file := _adapter(run):
        found["adapter"] = file_sha256(file)
    return pa.table({"key": list(found), "value": list(found.values())})


def _adapter(run: Run[NegativesConfig]) -> Path | None:
    """The adapter file of an earlier run; None for full-text search and the base. Raises ValueError if it is missing."""
    name = run.config.encoder
    if name in ("", BASE):
        return None
    if not (file := run.root / name).is_file():
        raise ValueError(f'negatives.encoder must be "", "base" or an adapter file, got {name}: there is no file {file}')
    return Path(file)


def _pairs(run: Run[NegativesConfig]) -> list[Row]:
    columns = ["pair_id", "unit_id", "query", "query_id", "split", "rejected", "duplicate_group"]
    rows = run.inputs.rows(PAIRS).select(columns).to_pylist()
    return [row | {"trained": row["rejected"] is None and row["split"] == "train"} for row in rows]


def _corpus(run: Run[NegativesConfig]) -> tuple[list[Row], dict[str, int], dict[str, list[int]]]:
    """Units that may be negatives, by unit_id; their places; duplicate group -> places of those that may answer its queries."""
    held = {pair["unit_id"] for pair in run.once(_pairs) if pair["split"] != "train"}
    rows = run.inputs.rows(UNITS).select(["unit_id", "text_id", "words"]).sort_by("unit_id").to_pylist()
    units = [row for row in rows if row["unit_id"] not in held]
    places = {row["unit_id"]: place for place, row in enumerate(units)}
    groups: dict[str, list[int]] = {}
    for pair in run.once(_pairs):
        if pair["unit_id"] in places:
            groups.setdefault(pair["duplicate_group"], []).append(places[pair["unit_id"]])
    return units, places, groups


def find_negatives(run: Run[NegativesConfig]) -> Iterator[pa.RecordBatch]:
    """The hard negatives of the pending pairs."""
    pending = sorted(set(run.output.pending["pair_id"].to_pylist()))
    if not pending:
        return
    units, places, groups = run.once(_corpus)
    pairs = {row["pair_id"]: row for row in run.once(_pairs)}
    with _semantic(run, units) if run.config.encoder else _lexical(units) as search:
        for some in run.report.batches(pending, run.config.batch_size, "queries"):
            rows = []
            for pair_id in some:
                scores, pair = search(pairs[pair_id]), pairs[pair_id]
                found = {"pair_id": pair_id, "positive_score": float(scores[places[pair["unit_id"]]])}
                chosen = choose(scores, found["positive_score"], groups[pair["duplicate_group"]], run.config)
                for position, place in enumerate(chosen):
                    unit = {name: units[place][name] for name in ("unit_id", "text_id")}
                    score = {"score": float(scores[place]), "source": run.config.encoder or "lexical"}
                    rows.append({**found, "position": position, **unit, **score})
            yield NEGATIVES.record_batch(rows)


@contextmanager
def _lexical(units: list[Row]) -> Iterator[Search]:
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        lexical.build(Path(folder), [row["words"] for row in units])
        index = lexical.LexicalIndex(Path(folder), len(units))
        yield lambda pair: index.scores(pair["query"])


@contextmanager
def _semantic(run: Run[NegativesConfig], units: list[Row]) -> Iterator[Search]:
    from stages.retrieval.encoder import text_encoder

    lengths = dict(zip(*(run.inputs.rows(TOKENS)[name].to_pylist() for name in ("text_id", "count")), strict=True))
    counts = [lengths[row["text_id"]] for row in units]
    width = run.needs["family"].architecture.sizes(run.needs["encoder"]).dimensions
    vectors_TD, end = np.empty((sum(counts), width), np.float16), 0
    with text_encoder(run, run.inputs.tensors(TOKENS), _adapter(run)) as encode:
        for number, (row, count) in enumerate(zip(units, counts, strict=True), 1):
            vectors_TD[end : end + count] = encode(row["text_id"], "document")
            end += count
            if number % 64 == 0:
                run.report.progress(number, len(units), "documents encoded")
        matrix = TokenMatrix(vectors_TD, counts)
        yield lambda pair: matrix.scores([encode(pair["query_id"], "query")])[0]


def choose(scores: np.ndarray, own: float, excluded: list[int], config: NegativesConfig) -> list[int]:
    """Positions of at most `count` documents; `own` is the score of the query's own one, and `excluded` are never chosen.

    Highest scores first, the best `skip` after them, and last those that may answer the query too (above `max_ratio` x own).
    """
    # Ties by position, so that a run again chooses the same.
    order = np.lexsort((np.arange(len(scores)), -scores))
    allowed = order[~np.isin(order, excluded)]
    # BM25 gives 0 to a document that shares no word: a ratio of 0 says nothing.
    likely = scores[allowed] > config.max_ratio * own if own > 0 else np.zeros(len(allowed), bool)
    safe: list[int] = allowed[~likely].tolist()
    rest: list[int] = allowed[likely].tolist()
    # What was passed over fills up from its low end, so that `wanted_negatives` knows the number of rows without a search.
    return [*safe[config.skip :], *safe[: config.skip][::-1], *rest[::-1]][: config.count]


def forecast(outlook: Outlook) -> Forecast | None:
    if not outlook.sections["negatives"].encoder:
        return None
    _, documents = counts(outlook)
    vectors = VALUE_BYTES * encoder_sizes(outlook).dimensions * int(documents.sum())
    memory = encoding_memory(outlook, "float32", int(documents.max()))
    peak = memory.footprint + vectors
    remedy = Remedy({"negatives": {"encoder": ""}}, 0)
    return Forecast(peak, how="vectors of all documents in memory", find_remedy=lambda: remedy, arrays=memory.peak + vectors)


STAGE = Stage(
    reads=(PAIRS, UNITS, TOKENS),
    writes=NEGATIVES,
    config=NegativesConfig,
    needs=("family", "encoder"),
    wants=wanted_negatives,
    run=find_negatives,
    forecast=forecast,
    snapshot=snapshot,
    opens=lambda run: filter(None, [_adapter(run)]),
    model=lambda config: bool(config.encoder),
    version=2,  # documents of held-out pairs are no negatives
)
