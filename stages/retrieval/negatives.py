"""The stage `negatives`: for every training query the documents that a search ranks high although they do not answer it.

Documents of held-out pairs are left out. Training would see them as wrong answers only, and learn to rank them low.

The search is full-text search, or MaxSim with the encoder before this training: the base, or an adapter of an earlier run.
"""

from __future__ import annotations

import gc
import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.retrieval import NEGATIVES, PAIRS, TOKENS, UNITS
from stages.hashing import file_sha256
from stages.memory import Forecast, Outlook, Remedy
from stages.retrieval.memory import VALUE_BYTES, counts, encoder_sizes, encoding_memory
from stages.retrieval.search import lexical
from stages.retrieval.search.maxsim import TokenMatrix
from stages.retrieval.texts import BASE
from stages.run import Run
from stages.settings import COUNT, NUMBER, Section, runtime, setting
from stages.stage import Stage

Row = dict[str, Any]
Search = Callable[[Row], np.ndarray]  # pair -> the score of every unit for its query, in the order of `_units`


@dataclass(frozen=True)
class NegativesConfig(Section):
    """The section [negatives]: how hard negatives are chosen for each training pair."""

    encoder: str = setting(
        "",
        'what ranks the documents: empty for full-text search, "base" for the untuned encoder, or the adapter file of an earlier '
        "run, relative to the project; an encoder reads every document again, which takes as long as the stage vectors",
        path=True,
    )
    count: int = setting(4, "hard negatives per pair; fewer if search finds fewer; 0: none", bounds=(0, lexical.FOUND // 2))
    skip: int = setting(
        0, "best documents that are passed over, since some of them may answer the query too", bounds=(0, lexical.FOUND // 4)
    )
    max_ratio: float = setting(
        1.25,
        "a document that scores higher than this times the pair's own document is passed over: it may answer the query too",
        bounds=(0.0, NUMBER[1]),
    )
    batch_size: int = runtime(128, "pairs per record batch, which a kill can lose", bounds=COUNT)


def wanted_negatives(run: Run[NegativesConfig]) -> pa.Table:
    """`pair_id` and `position`: `count` per training pair, or as many as there are documents outside its duplicate group."""
    units = run.once(_units)
    pairs = [row for row in run.once(_pairs) if _is_trained(row)]
    groups = run.once(_groups)
    sizes = {pair["pair_id"]: len(units) - len(groups[pair["duplicate_group"]] & units.keys()) for pair in pairs}
    rows = [
        {"pair_id": pair_id, "position": position}
        for pair_id, others in sorted(sizes.items())
        for position in range(min(run.config.count, others))
    ]
    return NEGATIVES.select(rows, NEGATIVES.key)


def snapshot(run: Run[NegativesConfig]) -> pa.Table:
    """What the rows depend on: the words of each unit, the group of each pair, and the adapter file."""
    # Held-out units are not in it: a change of theirs changes no row.
    units = {unit_id: _digest(row["words"]) for unit_id, row in run.once(_units).items()}
    pairs = {row["pair_id"]: f"{row['unit_id']} {row['duplicate_group']} {_is_trained(row)}" for row in run.once(_pairs)}
    file = _adapter(run)
    adapter = {"adapter": file_sha256(file)} if file else {}
    found = {**units, **pairs, **adapter}
    return pa.table({"key": list(found), "value": list(found.values())})


def _adapter(run: Run[NegativesConfig]) -> Path | None:
    """The adapter file of an earlier run; None for full-text search and the base. Raises ValueError if it is missing."""
    name = run.config.encoder
    if name in ("", BASE):
        return None
    if not (file := run.root / name).is_file():
        raise ValueError(f'negatives.encoder must be "", "base" or an adapter file, got {name}: there is no file {file}')
    return Path(file)


def opened_files(run: Run[NegativesConfig]) -> Iterator[Path]:
    if file := _adapter(run):
        yield file


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _units(run: Run[NegativesConfig]) -> dict[str, Row]:
    """The units that may be negatives, by unit_id, which is also their order."""
    held = {pair["unit_id"] for pair in run.once(_pairs) if pair["split"] != "train"}
    rows = run.inputs.rows(UNITS).select(["unit_id", "text_id", "words"]).to_pylist()
    return {row["unit_id"]: row for row in sorted(rows, key=lambda row: str(row["unit_id"])) if row["unit_id"] not in held}


def _pairs(run: Run[NegativesConfig]) -> list[Row]:
    return list(
        run.inputs.rows(PAIRS)
        .select(["pair_id", "unit_id", "query", "query_id", "split", "rejected", "duplicate_group"])
        .to_pylist()
    )


def _is_trained(pair: Row) -> bool:
    return pair["rejected"] is None and pair["split"] == "train"


def _groups(run: Run[NegativesConfig]) -> dict[str, set[str]]:
    """Duplicate group -> its units, all of which may answer its queries."""
    found: dict[str, set[str]] = {}
    for row in run.once(_pairs):
        found.setdefault(row["duplicate_group"], set()).add(row["unit_id"])
    return found


def find_negatives(run: Run[NegativesConfig]) -> Iterator[pa.RecordBatch]:
    """The hard negatives of the pending pairs."""
    pending = sorted(set(run.output.pending["pair_id"].to_pylist()))
    if not pending:
        return
    units, groups = run.once(_units), run.once(_groups)
    pairs = {row["pair_id"]: row for row in run.once(_pairs)}
    ids = list(units)
    places = {unit_id: place for place, unit_id in enumerate(ids)}
    with _semantic(run, units) if run.config.encoder else _lexical(units) as search:
        for start in range(0, len(pending), run.config.batch_size):
            if run.report.stop():
                return
            some = pending[start : start + run.config.batch_size]
            rows = []
            for pair in (pairs[pair_id] for pair_id in some):
                excluded = [places[unit_id] for unit_id in groups[pair["duplicate_group"]] if unit_id in places]
                rows += _rows(pair, search(pair), places, excluded, ids, units, run.config)
            yield NEGATIVES.record_batch(rows)
            run.report.progress(start + len(some), len(pending), "queries")


@contextmanager
def _lexical(units: dict[str, Row]) -> Iterator[Search]:
    """BM25 scores, from an index in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        lexical.build(Path(folder), [row["words"] for row in units.values()])
        index = lexical.LexicalIndex(Path(folder), len(units))
        yield lambda pair: index.scores(pair["query"])


@contextmanager
def _semantic(run: Run[NegativesConfig], units: dict[str, Row]) -> Iterator[Search]:
    """MaxSim scores over the vectors of all units, which are encoded first."""
    import mlx.core as mx

    from stages.retrieval.encoder import load_encoder

    tokens = run.inputs.tensors(TOKENS)
    held = [load_encoder(run.needs["encoder"], None, run.needs["family"], _adapter(run))]

    def encode(text_id: str) -> np.ndarray:
        return held[0].encode_ids([tokens.read(text_id)])[0]  # one at a time, so that no row depends on another

    try:
        lengths = dict(zip(*(run.inputs.rows(TOKENS)[name].to_pylist() for name in ("text_id", "count")), strict=True))
        counts = [lengths[row["text_id"]] for row in units.values()]
        vectors_TD, end = np.empty((sum(counts), held[0].width), np.float16), 0
        for number, (row, count) in enumerate(zip(units.values(), counts, strict=True), 1):
            vectors_TD[end : end + count] = encode(row["text_id"])
            end += count
            if number % 64 == 0:
                run.report.progress(number, len(units), "documents encoded")
        matrix = TokenMatrix(vectors_TD, counts)
        yield lambda pair: matrix.scores([encode(pair["query_id"])])[0]
    finally:
        held.clear()  # the search may outlive this, the weights may not
        gc.collect()
        mx.clear_cache()


def _rows(
    pair: Row,
    scores: np.ndarray,
    places: dict[str, int],
    excluded: list[int],
    ids: list[str],
    units: dict[str, Row],
    config: NegativesConfig,
) -> list[Row]:
    own = float(scores[places[pair["unit_id"]]])
    chosen = choose(scores, own, excluded, config)
    return [
        {
            "pair_id": pair["pair_id"],
            "position": position,
            "unit_id": ids[place],
            "text_id": units[ids[place]]["text_id"],
            "score": float(scores[place]),
            "positive_score": own,
            "source": config.encoder or "lexical",
        }
        for position, place in enumerate(chosen)
    ]


def choose(scores: np.ndarray, own: float, excluded: list[int], config: NegativesConfig) -> list[int]:
    """Positions of at most `count` documents; `own` is the score of the query's own one, and `excluded` are never chosen.

    The highest scores come first, but the best `skip` only after them, then those that may answer the query too (above
    `max_ratio` x own).
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
    """One document being encoded, and the vectors of all; None without an encoder."""
    if not outlook.sections["negatives"].encoder:
        return None
    _, documents = counts(outlook)
    vectors = VALUE_BYTES * encoder_sizes(outlook).dimensions * int(documents.sum())
    peak = encoding_memory(outlook, "float32", int(documents.max())).peak + vectors
    remedy = Remedy({"negatives": {"encoder": ""}}, 0) if peak > outlook.budget else None
    return Forecast(peak, how="vectors of all documents in memory", remedy=remedy)


STAGE = Stage(
    reads=(PAIRS, UNITS, TOKENS),
    writes=NEGATIVES,
    config=NegativesConfig,
    needs=("family", "encoder"),
    wants=wanted_negatives,
    run=find_negatives,
    forecast=forecast,
    snapshot=snapshot,
    opens=opened_files,
    model=lambda config: bool(config.encoder),
    version=2,  # documents of held-out pairs are no negatives
)
