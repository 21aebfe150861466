"""The stage `ranks`: the rank that each search gives the right unit, for every query of valid and test.

Every encoder in the table `vectors` is ranked, so that the tuned encoder and the base are compared on the same queries. In the
mode `hard`, the unit's own name is removed from its words and from its text.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from schemas.retrieval import PAIRS, RANKS, UNITS, VECTORS
from stages.memory import Forecast, Outlook
from stages.retrieval import texts
from stages.retrieval.memory import held_out_pairs
from stages.retrieval.search import codes, lexical, measures
from stages.retrieval.search.maxsim import TokenMatrix
from stages.retrieval.texts import HELD_OUT, Row, document_order, used_pairs
from stages.run import Run
from stages.settings import COUNT, Section, runtime, setting
from stages.stage import Stage

SCORE_BYTES = 4
DOCUMENTS = 2000  # documents whose vectors are in memory together


@dataclass(frozen=True)
class RanksConfig(Section):
    candidates: Literal["units", "pairs"] = setting(
        "units", "units: every unit, as in a search; pairs: the units with a pair that is used, as code-search benchmarks do"
    )
    # A name gives much away: BM25 falls from P@1 .343 to .255 without it.
    hard: bool = setting(True, "also rank with the units' own names removed")
    batch_size: int = runtime(256, "queries per record batch, which a kill can lose", unit="queries", bounds=COUNT)


def wanted_ranks(run: Run[RanksConfig]) -> pa.Table:
    """One row per encoder, mode and pair of valid and test."""
    pairs = run.once(_held_out)
    modes = ("plain", "hard") if run.config.hard else ("plain",)
    keys = product([pair["pair_id"] for pair in pairs], _encoders(run), modes)
    return RANKS.select([dict(zip(RANKS.key, key, strict=True)) for key in keys], RANKS.key)


def snapshot(run: Run[RanksConfig]) -> pa.Table:
    units, pairs = run.inputs.rows(UNITS), run.inputs.rows(PAIRS)
    found = dict(zip(units["unit_id"].to_pylist(), units["text_id"].to_pylist(), strict=True))
    columns = ("split", "rejected", "duplicate_group")
    found |= {row["pair_id"]: str([row[name] for name in columns]) for row in pairs.select(["pair_id", *columns]).to_pylist()}
    vectors = Counter(run.inputs.rows(VECTORS)["encoder"].to_pylist())  # documents without names are encoded or not
    found |= {encoder: str(count) for encoder, count in vectors.items()}
    return pa.table({"key": list(found), "value": list(found.values())})


def _held_out(run: Run[RanksConfig]) -> list[Row]:
    return [row for split in HELD_OUT for row in used_pairs(run.inputs.rows(PAIRS), split)]


def _encoders(run: Run[RanksConfig]) -> list[str]:
    return sorted(set(run.inputs.rows(VECTORS)["encoder"].to_pylist()))


def rank_pairs(run: Run[RanksConfig]) -> Iterator[pa.RecordBatch]:
    pending = {tuple(row.values()) for row in run.output.pending.select(list(RANKS.key)).to_pylist()}
    pairs, done = run.once(_held_out), 0
    for mode in ("plain", "hard"):
        if not any(key[2] == mode for key in pending):
            continue
        with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
            corpus = Corpus(run, mode, Path(folder))
            for encoder in _encoders(run):
                wanted = [pair for pair in pairs if (pair["pair_id"], encoder, mode) in pending]
                # On all pairs of valid, so that it does not depend on which rows are missing.
                weight = corpus.best_weight(encoder, [pair for pair in pairs if pair["split"] == "valid"]) if wanted else 0.0
                for start in range(0, len(wanted), run.config.batch_size):
                    if run.report.stop():
                        return
                    some = wanted[start : start + run.config.batch_size]
                    yield RANKS.record_batch(corpus.rank(encoder, some, weight))
                    done += len(some)
                    run.report.progress(done, len(pending), "queries")


class Corpus:
    """The documents of an evaluation. In the mode "hard", those that answer a query have "f" in place of their name."""

    def __init__(self, run: Run[RanksConfig], mode: str, folder: Path) -> None:
        self.mode = mode
        self.tensors = run.inputs.tensors(VECTORS)
        rows = run.inputs.rows(VECTORS).select(["vector_id", "encoder", "text_id", "count"]).to_pylist()
        self.vectors = {(row["encoder"], row["text_id"]): row for row in rows}
        pairs = run.inputs.rows(PAIRS).to_pylist()
        used = {row["unit_id"] for row in pairs if row["rejected"] is None}
        columns = ["unit_id", "name", "text", "text_id", "words", "path", "first_line"]
        rows = run.inputs.rows(UNITS).select(columns).to_pylist()
        units = rows if run.config.candidates == "units" else [row for row in rows if row["unit_id"] in used]
        self.units = sorted(units, key=document_order)
        self.place = {row["unit_id"]: place for place, row in enumerate(self.units)}
        self.groups: dict[str, list[int]] = {}
        for row in pairs:
            if row["unit_id"] in self.place:
                self.groups.setdefault(row["duplicate_group"], []).append(self.place[row["unit_id"]])
        if mode == "hard":
            self.units = [without_name(row) if row["unit_id"] in used else row for row in self.units]
        lexical.build(folder, [row["words"] for row in self.units])
        self.words = lexical.LexicalIndex(folder, len(self.units))
        self.known: dict[str, np.ndarray] = {}

    def lexical(self, pair: Row) -> np.ndarray:
        if pair["pair_id"] not in self.known:
            self.known[pair["pair_id"]] = self.words.scores(pair["query"])
        return self.known[pair["pair_id"]]

    def semantic(self, encoder: str, pairs: list[Row]) -> np.ndarray | None:
        """Scores (queries, documents), float32. None in the mode "hard" if a document has no vectors."""
        rows = [row for unit in self.units if (row := self.vectors.get((encoder, unit["text_id"])))]
        if len(rows) < len(self.units):
            # Documents without names have vectors only with [tokens] hard.
            if self.mode == "plain":
                raise ValueError("some units have no vectors: run make vectors")
            return None
        asked = [row for pair in pairs if (row := self.vectors.get((encoder, pair["query_id"])))]
        if len(asked) < len(pairs):
            raise ValueError("some queries have no vectors: run make vectors")
        queries = [codes.unpack(self.tensors.read(row["vector_id"])) for row in asked]
        found = np.empty((len(pairs), len(rows)), np.float32)
        for start in range(0, len(rows), DOCUMENTS):
            some = rows[start : start + DOCUMENTS]
            matrix = codes.unpack(np.concatenate([self.tensors.read(row["vector_id"]) for row in some]))
            found[:, start : start + len(some)] = TokenMatrix(matrix, [row["count"] for row in some]).scores(queries)
            self.tensors.ahead(())  # release what was read
        return found

    def best_weight(self, encoder: str, pairs: list[Row]) -> float:
        """The first of lexical.WEIGHTS with the highest MRR@10; the default without pairs or semantic scores."""
        semantic = self.semantic(encoder, pairs) if pairs else None
        if semantic is None:
            return lexical.DEFAULT_WEIGHT
        means = []
        words = [self.lexical(pair) for pair in pairs]
        for weight in lexical.WEIGHTS:
            ranks = [
                self.rank_one(lexical.hybrid(one, other, weight), pair)
                for one, other, pair in zip(semantic, words, pairs, strict=True)
            ]
            means.append(measures.reciprocal(np.array(ranks)).mean())
        return lexical.WEIGHTS[int(np.argmax(means))]

    def rank_one(self, scores: np.ndarray, pair: Row) -> int:
        """From 1; equal scores rank before it, and its duplicate group is not counted."""
        own = self.place[pair["unit_id"]]
        others = [place for place in self.groups[pair["duplicate_group"]] if place != own]
        return measures.rank_of(scores, own, np.array(others, np.int64))

    def rank(self, encoder: str, pairs: list[Row], weight: float) -> list[Row]:
        semantic = self.semantic(encoder, pairs)
        rows = []
        for number, pair in enumerate(pairs):
            words = self.lexical(pair)
            row = {
                **{name: pair[name] for name in ("pair_id", "split", "query", "unit_id", "overlap")},
                "encoder": encoder,
                "mode": self.mode,
                "candidates": len(self.units) - len(self.groups[pair["duplicate_group"]]) + 1,
                "lexical": self.rank_one(words, pair),
                "semantic": None,
                "hybrid": None,
                "weight": None,
                "top_id": self.units[int(np.argmax(words))]["unit_id"],
            }
            if semantic is not None:
                scores = semantic[number]
                row |= {
                    "semantic": self.rank_one(scores, pair),
                    "hybrid": self.rank_one(lexical.hybrid(scores, words, weight), pair),
                    "weight": weight,
                    "top_id": self.units[int(np.argmax(scores))]["unit_id"],
                }
            rows.append(row)
        return rows


def without_name(unit: Row) -> Row:
    text = texts.without_name(unit["text"], unit["name"])
    return unit | {"text": text, "text_id": texts.text_id("document", text), "words": " ".join(texts.words(text))}


def forecast(outlook: Outlook) -> Forecast | None:
    units, held = outlook.rows(UNITS), held_out_pairs(outlook)
    if units is None or held is None:
        return None
    every = outlook.sections["ranks"].candidates == "units"
    candidates = units.num_rows if every else len(used_pairs(outlook.rows(PAIRS)))
    return Forecast(2 * SCORE_BYTES * held * candidates, how=f"{held} queries, {candidates} documents")


STAGE = Stage(
    reads=(VECTORS, PAIRS, UNITS),
    writes=RANKS,
    unit="query",
    config=RanksConfig,
    wants=wanted_ranks,
    run=rank_pairs,
    forecast=forecast,
    snapshot=snapshot,
)
