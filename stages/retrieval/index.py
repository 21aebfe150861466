"""The stage `index`: the vectors of all units in one memory-mapped matrix, and their words in a full-text index; and the
search over both, semantic, lexical or hybrid.

The matrix and the full-text index are artifacts. Their names hold a digest of the rows, so that rows and artifacts of two
states of the project are never used together.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import itemgetter
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.retrieval import INDEX, SOURCES, TOKENS, UNITS, VECTORS
from stages.hashing import text_sha256
from stages.memory import Forecast, Outlook
from stages.retrieval import texts
from stages.retrieval.memory import VALUE_BYTES, encoder_sizes
from stages.retrieval.search import lexical, maxsim
from stages.retrieval.texts import BASE, Row
from stages.run import Run
from stages.settings import COUNT, WHOLE, Section, runtime, selects
from stages.stage import Stage

KEPT = ("unit_id", "encoder", "vector_id", "file")  # the columns on which the freshness of a row depends
LEXICAL_BYTES, LEXICAL_SHARE = 20_000, 0.85  # of the full-text index: bytes in all, and per byte of the words; about
MATRIX, WORDS, PARTITIONS = "vectors-{}.npy", "words-{}.lance", "partitions-{}.lance"  # artifacts, by the digest of the rows


@dataclass(frozen=True)
class IndexConfig(Section):
    encoder: Literal["tuned", "base"] = selects(
        "tuned", "the encoder whose vectors are searched: tuned, or the base if nothing was tuned; or base"
    )
    exact_tokens: int = selects(
        4_000_000,
        "vectors up to which every one is compared; beyond, candidates come from a partitioned index: 0 always uses it",
        unit="vectors",
        bounds=(0, WHOLE[1]),
    )
    batch_size: int = runtime(2048, "units per record batch", unit="units", bounds=COUNT)


def wanted_index(run: Run[IndexConfig]) -> pa.Table:
    return INDEX.select(run.once(_rows), KEPT)


def _rows(run: Run[IndexConfig]) -> list[Row]:
    """One row per unit in document order. Raises ValueError if a unit has no vectors of the chosen encoder."""
    columns = ["unit_id", "path", "qualified_name", "first_line", "last_line", "signature", "text_id", "words"]
    units = run.inputs.rows(UNITS).select(columns).to_pylist()
    files = dict(zip(*(run.inputs.rows(SOURCES)[name].to_pylist() for name in ("path", "file")), strict=True))
    vectors = run.inputs.rows(VECTORS)
    chosen = choose_encoder(set(vectors["encoder"].to_pylist()), run.config.encoder)
    documents = vectors.filter((pc.field("encoder") == chosen) & (pc.field("role") == "document"))
    of_text = {row["text_id"]: row for row in documents.select(["text_id", "vector_id", "encoder", "count"]).to_pylist()}
    if missing := [unit for unit in units if unit["text_id"] not in of_text]:
        raise ValueError(f"{len(missing)} units have no vectors, such as {missing[0]['path']}: run make vectors")
    return [{**unit, **of_text[unit["text_id"]], "file": files[unit["path"]]} for unit in sorted(units, key=texts.document_order)]


def choose_encoder(encoders: set[str], wanted: str) -> str:
    """The tuned encoder, or the base. Raises ValueError if the choice has no vectors, or several are tuned."""
    tuned = sorted(encoders - {BASE})
    if wanted == BASE or not tuned:
        if BASE not in encoders:
            raise ValueError("the table vectors holds no vectors of the base: run make vectors, or set index.encoder to tuned")
        return BASE
    if len(tuned) > 1:
        names = ", ".join(name[:8] for name in tuned)
        raise ValueError(f"the table vectors holds vectors of {len(tuned)} tuned encoders ({names}): run make vectors")
    return tuned[0]


def list_units(run: Run[IndexConfig]) -> Iterator[pa.RecordBatch]:
    pending = set(run.output.pending["unit_id"].to_pylist())
    rows = [row for row in run.once(_rows) if row["unit_id"] in pending] if pending else []
    for some in run.report.batches(rows, run.config.batch_size, "units"):
        yield INDEX.record_batch(some)


def digest(rows: list[Row]) -> str:
    """16 hex digits over the unit_ids and vector_ids in document order."""
    lines = (f"{row['unit_id']} {row['vector_id']}" for row in sorted(rows, key=texts.document_order))
    return text_sha256(*lines)[:16]


def folder_artifacts(rows: list[Row]) -> list[str]:
    """The names of the artifacts of these rows that are folders; not every index has all."""
    return [name.format(digest(rows)) for name in (WORDS, PARTITIONS)]


def write_index(run: Run[IndexConfig]) -> Iterator[pa.RecordBatch]:
    """Write the artifacts that are missing, and delete those of an earlier index."""
    rows, kept = run.once(_rows), itemgetter(*KEPT)
    # The run was stopped before all rows were stored.
    if not set(map(kept, rows)) <= set(map(kept, run.output.stored.select(list(KEPT)).to_pylist())):
        return
    name, reader = digest(rows), run.inputs.tensors(VECTORS)
    tokens = sum(row["count"] for row in rows)
    width = reader.read(rows[0]["vector_id"]).shape[1]

    def vectors() -> Iterator[np.ndarray]:
        for number, row in enumerate(rows, 1):
            yield reader.read(row["vector_id"]).view(np.float16)
            if number % 256 == 0:
                reader.ahead(())  # release what was read
                run.report.progress(number, len(rows), "units")

    wanted = {
        WORDS.format(name): lambda path: lexical.build(path, [row["words"] for row in rows]),
        MATRIX.format(name): lambda path: maxsim.write_matrix(path, vectors(), tokens, width),
    }
    if tokens > run.config.exact_tokens:
        wanted[PARTITIONS.format(name)] = lambda path: maxsim.build_partitions(path, vectors(), width, tokens)
    for artifact, write in wanted.items():
        if not (run.output.artifacts / artifact).exists():
            run.output.write(artifact, write)
            run.report.say(f"{artifact}: {len(rows)} units, {tokens} vectors")
    for path in run.output.artifacts.iterdir():
        if path.name not in wanted and path.suffix in (".npy", ".lance"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    yield from ()


def forecast(outlook: Outlook) -> Forecast | None:
    units, rows = outlook.rows(UNITS), outlook.rows(TOKENS)
    if units is None or rows is None:
        return None
    lengths = dict(zip(rows["text_id"].to_pylist(), rows["count"].to_pylist(), strict=True))
    tokens = sum(lengths.get(text_id, 0) for text_id in units["text_id"].to_pylist())
    partitioned = tokens > outlook.sections["index"].exact_tokens
    vectors = VALUE_BYTES * encoder_sizes(outlook).dimensions * tokens
    words = sum(len(text.encode()) for text in units["words"].to_pylist())
    files = vectors * (1 + partitioned) + LEXICAL_BYTES + int(LEXICAL_SHARE * words)
    return Forecast(0, file_bytes=files, how=f"{tokens} vectors" + (", partitioned" if partitioned else ""))


Mode = Literal["semantic", "lexical", "hybrid"]

RESIDENT_BYTES = 2**30  # a matrix of at most this size, as float32, is held in memory if many queries are to be answered


class QueryEncoder(Protocol):
    def encode_queries(self, queries: Sequence[str]) -> list[np.ndarray]:
        """Float32 (tokens, width) per query, each vector of length 1."""


@dataclass(frozen=True)
class Answer:
    row: Row  # of the table `index`
    place: int  # in the index, from 0
    score: float  # by which answers are sorted
    semantic: float | None = None  # None: that search did not run
    lexical: float | None = None


class Searcher:
    """`rows`: the whole table `index`. `encoder` None: lexical only. `weight`: share of the semantic scores in hybrid search.
    `resident` reads vectors of up to 1 GiB into memory, which answers many queries faster.
    """

    def __init__(
        self,
        rows: list[Row],
        artifacts: Path,
        encoder: QueryEncoder | None,
        weight: float = lexical.DEFAULT_WEIGHT,
        *,
        resident: bool = False,
    ) -> None:
        self.rows = sorted(rows, key=texts.document_order)
        self.encoder, self.weight = encoder, weight
        name = digest(self.rows)
        if not (artifacts / MATRIX.format(name)).is_file() or not (artifacts / WORDS.format(name)).is_dir():
            raise ValueError(f"the index in {artifacts} is incomplete or of another state of the project: run make index")
        self.words = lexical.LexicalIndex(artifacts / WORDS.format(name), len(rows))
        self.vectors: maxsim.TokenMatrix | maxsim.PartitionedIndex | None = None
        if encoder is not None:
            counts = [row["count"] for row in self.rows]
            file = artifacts / MATRIX.format(name)
            resident = resident and 2 * file.stat().st_size <= RESIDENT_BYTES
            self.matrix = maxsim.TokenMatrix.open(file, counts, resident=resident)
            parts = artifacts / PARTITIONS.format(name)
            self.vectors = maxsim.PartitionedIndex(parts, len(rows)) if parts.is_dir() else self.matrix

    def search(self, query: str, mode: Mode = "hybrid", limit: int = 10, path: str = "") -> list[Answer]:
        """The best answers, at most `limit`. `path` is a wildcard pattern of files. ValueError for a query without words."""
        if not texts.words(query):
            raise ValueError(f"the query must have a word, got {query!r}")
        found: dict[str, np.ndarray] = {}
        if mode != "semantic":
            found["lexical"] = self.words.scores(query)
        if mode != "lexical":
            assert self.encoder is not None and self.vectors is not None, "semantic search needs an encoder"
            [self.query_vectors] = self.encoder.encode_queries([query])
            found["semantic"] = self.vectors.scores([self.query_vectors])[0]
        scores = lexical.hybrid(found["semantic"], found["lexical"], self.weight) if mode == "hybrid" else found[mode]
        places = np.arange(len(self.rows))
        if path:
            places = places[[fnmatchcase(row["path"], path) for row in self.rows]]
        if mode == "lexical":
            places = places[scores[places] > 0]
        best = places[np.lexsort((places, -scores[places]))][:limit].tolist()
        return [
            Answer(self.rows[place], place, float(scores[place]), **{name: float(each[place]) for name, each in found.items()})
            for place in best
        ]

    def related(self, place: int, limit: int) -> list[Answer]:
        """The units most like that at `place`, by its stored vectors; itself left out."""
        scores = self.matrix.scores([self.matrix.document(place)])[0]
        order = np.argsort(-scores, kind="stable")
        best = [other for other in order.tolist() if other != place][:limit]
        return [Answer(self.rows[other], other, float(scores[other]), semantic=float(scores[other])) for other in best]

    def explain(self, answer: Answer, query_tokens: list[str], document_tokens: list[str]) -> list[tuple[str, str, float]]:
        """(query token, best document token, product) of the last search with the encoder; texts in the order of the vectors."""
        document = self.matrix.document(answer.place)
        best, products = maxsim.matches(self.query_vectors, document)
        return [
            (query_tokens[number], document_tokens[place], float(product))
            for number, (place, product) in enumerate(zip(best.tolist(), products.tolist(), strict=True))
        ]


STAGE = Stage(
    reads=(VECTORS, UNITS, SOURCES),
    writes=INDEX,
    config=IndexConfig,
    wants=wanted_index,
    run=list_units,
    finish=write_index,
    forecast=forecast,
    divisible=False,
)
