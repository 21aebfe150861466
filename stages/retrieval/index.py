"""The stage `index`: one vector of each unit, which leads to the units that are compared in full, and the words of all in a
full-text index; and the search over both, semantic, lexical or hybrid. The vectors of all tokens stay in the table `vectors`.

Both are artifacts. Their names hold a digest of the rows, so that rows and artifacts of two states of the project are never
used together. What an earlier index has of units that are still there is copied from it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.retrieval import INDEX, RANKS, SOURCES, UNITS, VECTORS
from stages import blas
from stages.hashing import text_sha256
from stages.intervals import bootstrap_mean
from stages.memory import Forecast, Outlook
from stages.retrieval import texts
from stages.retrieval.memory import encoder_sizes
from stages.retrieval.search import codes, lexical, maxsim, measures, ranking
from stages.retrieval.texts import BASE, Row
from stages.run import Run, TensorReader
from stages.settings import COUNT, Section, runtime, selects
from stages.stage import Stage

KEPT = (
    "unit_id",
    "encoder",
    "vector_id",
    "file",
    "title_vector",
    "words_id",
)  # the columns on which the freshness of a row depends
UNIT_COLUMNS = (
    *("unit_id", "path", "qualified_name", "first_line", "last_line", "signature", "text_id", "title_id", "docstring_words"),
)
VECTOR_COLUMNS = ("vector_id", "encoder", "text_id", "role", "count")
COMPARED = ("pair_id", "encoder", "mode", "split", "hybrid")  # columns of `ranks` by which the encoder is chosen
FEWEST = 20  # queries; of fewer, an interval by resampling is too narrow
POOLED_BYTES, ID_BYTES = 2, 68  # of a value of a pooled vector, and of a vector_id
SAMPLE = 1000  # units whose words are measured for the forecast
LEXICAL_BYTES, LEXICAL_SHARE = 20_000, 0.85  # of the full-text index: bytes in all, and per byte of the words; about
POOLED, WORDS = "pooled-{}.arrow", "words-{}.lance"  # artifacts, by the digest of the rows


@dataclass(frozen=True)
class IndexConfig(Section):
    encoder: Literal["better", "tuned", "base"] = selects(
        "better",
        "the encoder whose vectors are searched. better: the tuned one if its MRR@10 of the valid queries in the table ranks is "
        "higher by more than chance, else the base; tuned: the base if nothing was tuned",
    )
    batch_size: int = runtime(2048, "units per record batch", unit="units", bounds=COUNT)


def wanted_index(run: Run[IndexConfig]) -> pa.Table:
    return run.once(_rows).select(list(KEPT))


def _rows(run: Run[IndexConfig]) -> pa.Table:
    """One row per unit in document order. Raises ValueError if a unit has no vectors of the chosen encoder."""
    units, sources = run.inputs.rows(UNITS, UNIT_COLUMNS), run.inputs.rows(SOURCES, ("path", "file"))
    vectors = run.inputs.rows(VECTORS, VECTOR_COLUMNS)
    chosen, _ = run.once(_choice)
    documents = vectors.filter((pc.field("encoder") == chosen) & (pc.field("role") == "document"))
    place = pc.index_in(units["text_id"], documents["text_id"].combine_chunks())
    if missing := units.filter(pc.is_null(place))["path"].to_pylist():
        raise ValueError(f"{len(missing)} units have no vectors, such as {missing[0]}: run make vectors")
    found = {name: units[name] for name in INDEX.batch.names if name in units.column_names}
    found |= {name: documents[name].take(place) for name in ("encoder", "vector_id", "count")}
    title = pc.index_in(units["title_id"], documents["text_id"].combine_chunks())
    found["title_vector"] = pc.fill_null(documents["vector_id"].take(title), "")
    if missing := units.filter(pc.and_(pc.is_null(title), pc.not_equal(units["title_id"], "")))["path"].to_pylist():
        raise ValueError(f"{len(missing)} titles have no vectors, such as one in {missing[0]}: run make vectors")
    words = units["docstring_words"].combine_chunks().dictionary_encode()  # most are empty
    words_ids = pa.array([sha256(each.encode()).hexdigest()[:16] for each in words.dictionary.to_pylist()], pa.string())
    found["words_id"] = words_ids.take(words.indices)
    found["file"] = sources["file"].take(pc.index_in(units["path"], sources["path"].combine_chunks()))
    return in_order(pa.table([found[name] for name in INDEX.batch.names], names=INDEX.batch.names).cast(INDEX.batch))


def in_order(rows: pa.Table) -> pa.Table:
    return rows.sort_by([(name, "ascending") for name in ("path", "first_line", "unit_id")]).combine_chunks()


def _choice(run: Run[IndexConfig]) -> tuple[str, str]:
    encoders = set(run.inputs.rows(VECTORS, VECTOR_COLUMNS)["encoder"].unique().to_pylist())
    return choose_encoder(encoders, run.config.encoder, lambda: run.inputs.rows(RANKS, COMPARED))


def choose_encoder(encoders: set[str], wanted: str, ranks: Callable[[], pa.Table]) -> tuple[str, str]:
    """(encoder, a line for the user if ranks decided). `ranks`: COMPARED of the table. Raises ValueError if the choice has no
    vectors, or several are tuned.
    """
    tuned = sorted(encoders - {BASE})
    if wanted == BASE or not tuned:
        if BASE not in encoders:
            raise ValueError("the table vectors holds no vectors of the base: run make vectors, or set index.encoder to tuned")
        return BASE, ""
    if len(tuned) > 1:
        names = ", ".join(name[:8] for name in tuned)
        raise ValueError(f"the table vectors holds vectors of {len(tuned)} tuned encoders ({names}): run make vectors")
    if wanted == "tuned" or BASE not in encoders:
        return tuned[0], ""
    better, figures = gain(ranks(), tuned[0])
    if better:
        return tuned[0], f"{figures}, so the tuned encoder is searched"
    return BASE, f'{figures}: the base is searched; [index] encoder = "tuned" searches the tuned one anyway'


def gain(ranks: pa.Table, tuned: str) -> tuple[bool, str]:
    """Does the tuned encoder answer the valid queries better in hybrid search, beyond chance; and the figures."""
    found = ranks.filter((pc.field("split") == "valid") & (pc.field("mode") == "plain")).sort_by("pair_id")
    # Both have the same queries in the same order, so the difference is paired.
    base_Q, tuned_Q = (
        measures.reciprocal(found.filter(pc.field("encoder") == name)["hybrid"].to_numpy()) for name in (BASE, tuned)
    )
    if len(base_Q) < FEWEST:
        return False, f"{len(base_Q)} held-out queries (pairs.valid) are too few to say whether tuning helped"
    gains_Q = tuned_Q - base_Q
    mean, (low, high) = gains_Q.mean(), bootstrap_mean(gains_Q)
    figures = f"tuning changes MRR@10 of {len(gains_Q)} held-out queries by {mean:+.3f} [{low:+.3f}, {high:+.3f}]"
    return low > 0, figures if low > 0 else f"{figures}, not up beyond chance"


def list_units(run: Run[IndexConfig]) -> Iterator[pa.RecordBatch]:
    rows, (_, line) = run.once(_rows), run.once(_choice)
    if line:
        run.report.say(line)
    rows = rows.filter(pc.is_in(rows["unit_id"], run.output.pending["unit_id"].combine_chunks()))
    for some in run.report.batches(range(rows.num_rows), run.config.batch_size, "units"):
        yield from rows.slice(some[0], len(some)).combine_chunks().to_batches()


def digest(rows: pa.Table) -> str:
    """16 hex digits over the unit_ids, vector_ids and words_ids, in document order."""
    return text_sha256(*("".join(rows[name].to_pylist()) for name in ("unit_id", "vector_id", "words_id")))[:16]


def folder_artifacts(rows: pa.Table) -> list[str]:
    """The names of the artifacts of these rows, in document order, that are folders."""
    return [WORDS.format(digest(rows))]


def write_index(run: Run[IndexConfig]) -> Iterator[pa.RecordBatch]:
    """Write the artifacts that are missing, and delete those of an earlier index."""
    rows, stored = run.once(_rows), run.output.stored
    there = pa.table({name: stored[name].take(pc.index_in(rows["unit_id"], stored["unit_id"].combine_chunks())) for name in KEPT})
    # The run was stopped before all rows were stored.
    if not there.equals(rows.select(list(KEPT)).cast(there.schema)):
        return
    name = digest(rows)
    wanted = {
        WORDS.format(name): lambda path: _write_words(run, rows, path),
        POOLED.format(name): lambda path: _write_pooled(run, rows, path),
    }
    for artifact, write in wanted.items():
        if not (run.output.artifacts / artifact).exists():
            run.output.write(artifact, write)
            run.report.say(f"{artifact}: {rows.num_rows} units")
    for path in run.output.artifacts.iterdir():
        if path.name not in wanted and path.suffix in (".arrow", ".lance"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    yield from ()


def numbers(rows: pa.Table) -> np.ndarray:
    """Int64 of each row: what it is called in the full-text index. Another unit or other words have another number."""
    ids = (np.frombuffer(bytes.fromhex("".join(rows[name].to_pylist())), ">i8") for name in ("unit_id", "words_id"))
    unit_N, words_N = (each.reshape(rows.num_rows, -1)[:, 0] for each in ids)
    return np.asarray(unit_N ^ words_N, np.int64)


def _write_words(run: Run[IndexConfig], rows: pa.Table, path: Path) -> None:
    """The words of the code and of the docstring, which the vectors of the code do not show."""
    called = numbers(rows)

    def words(some: np.ndarray) -> pa.ChunkedArray:
        ids = rows["unit_id"].take(some).combine_chunks()
        units = run.inputs.rows(UNITS, ("unit_id", "words", "docstring_words"), ("unit_id", ids))
        found = units.take(pc.index_in(ids, units["unit_id"].combine_chunks()))
        return pc.binary_join_element_wise(found["words"], found["docstring_words"], " ")

    for earlier in run.output.artifacts.glob(WORDS.format("*")):
        # What is damaged would get a new checksum.
        if run.inputs.intact(INDEX, earlier.name) and lexical.revise(path, earlier, called, words):
            return
    lexical.build(path, words(np.arange(len(called))), called)


def _write_pooled(run: Run[IndexConfig], rows: pa.Table, path: Path) -> None:
    """One vector per row of `rows`; those of an earlier index are copied."""
    reader, ids = run.inputs.tensors(VECTORS), rows["vector_id"].combine_chunks()
    width = codes.unpack(reader.read(ids[0].as_py())).shape[1]
    pooled_ND, missing = np.empty((len(ids), width), np.float16), np.ones(len(ids), bool)
    for file in run.output.artifacts.glob(POOLED.format("*")):
        known, values_ND = read_pooled(file)
        place = pc.index_in(ids, known).to_numpy(zero_copy_only=False)
        there = ~np.isnan(place) if values_ND.shape[1] == width else np.zeros(len(ids), bool)
        pooled_ND[there], missing[there] = values_ND[place[there].astype(np.int64)], False
    for number, place in enumerate(np.flatnonzero(missing).tolist(), 1):
        pooled_ND[place] = maxsim.pool(codes.unpack(reader.read(ids[place].as_py())))
        if number % 256 == 0:
            reader.ahead(())  # release what was read
            run.report.progress(number, int(missing.sum()), "units")
    values = pa.FixedSizeListArray.from_arrays(pa.array(pooled_ND.ravel()), width)
    table = pa.table({"vector_id": ids, "pooled": values})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
        out.write_table(table)


def read_pooled(file: Path) -> tuple[pa.Array, np.ndarray]:
    """(vector_ids, float16 (N, D)). Raises ValueError if the file is damaged."""
    try:
        with pa.memory_map(str(file)) as mapped:
            table = pa.ipc.open_file(mapped).read_all().combine_chunks()
        values = table["pooled"].chunk(0)
        return table["vector_id"].chunk(0), values.values.to_numpy().reshape(len(values), -1)
    except (OSError, pa.ArrowException, KeyError, IndexError) as error:
        raise ValueError(f"{file} cannot be read: {error}; delete it and run make index") from None


def forecast(outlook: Outlook) -> Forecast | None:
    units = outlook.rows(UNITS, ("unit_id",))
    if units is None:
        return None
    ids = units["unit_id"].take(np.unique(np.linspace(0, units.num_rows - 1, SAMPLE, dtype=np.int64)))
    sample = outlook.rows(UNITS, ("words", "docstring_words"), ("unit_id", ids.combine_chunks()))
    assert sample is not None, "the table was there"
    words = sum(pc.sum(pc.binary_length(column), min_count=0).as_py() for column in sample.columns)
    words *= units.num_rows / max(1, sample.num_rows)
    pooled = units.num_rows * (POOLED_BYTES * encoder_sizes(outlook).dimensions + ID_BYTES)
    return Forecast(0, file_bytes=pooled + LEXICAL_BYTES + int(LEXICAL_SHARE * words), how=f"{units.num_rows} units")


RANKED = 300  # units whose titles are compared, at least
Mode = Literal["semantic", "lexical", "hybrid"]


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
    # 0 to 1: the mean of what its code and its title mean (MaxSim) and of the share of the query's words that it holds.
    match: float = 0.0


class Searcher:
    """`rows`: the whole table `index`, in document order. `vectors`: the tensors of the table `vectors`. `encoder` None: lexical
    only. `weight`: share of the semantic scores in hybrid search for a query of several words.
    """

    def __init__(
        self,
        rows: pa.Table,
        artifacts: Path,
        vectors: TensorReader,
        encoder: QueryEncoder | None,
        weight: float = ranking.SENTENCE,
    ) -> None:
        blas.one_thread_of_numpy()
        self.rows, self.vectors, self.encoder, self.weight = rows, vectors, encoder, weight
        name = digest(self.rows)
        if not (artifacts / POOLED.format(name)).is_file() or not (artifacts / WORDS.format(name)).is_dir():
            raise ValueError(f"the index in {artifacts} is incomplete or of another state of the project: run make index")
        self.words = lexical.LexicalIndex(artifacts / WORDS.format(name), len(rows), numbers(rows))
        self.ids, self.titles = (self.rows[name].to_pylist() for name in ("vector_id", "title_vector"))
        self.units = ranking.Units(*(self.rows[name] for name in ("path", "qualified_name", "signature")))
        self.matrix = maxsim.PooledMatrix(
            read_pooled(artifacts / POOLED.format(name))[1], lambda places: self.read([self.ids[place] for place in places])
        )

    def read(self, ids: list[str]) -> maxsim.TokenMatrix:
        """Of rows of the table `vectors`."""
        try:
            packed = [self.vectors.read(each) for each in ids]
        except KeyError:  # rows of a shard that is gone or cut are left out
            raise ValueError("vectors of the index are damaged or gone: run latentmill verify --repair") from None
        return maxsim.TokenMatrix(np.concatenate(packed), [len(each) for each in packed], codes.unpack)

    def document(self, place: int) -> np.ndarray:
        """Float32 (tokens, width), each vector of length 1."""
        return codes.unpack(self.read([self.ids[place]]).vectors_TD)

    def search(
        self,
        query: str,
        mode: Mode = "hybrid",
        limit: int = 10,
        paths: Sequence[str] = (),
        *,
        within: np.ndarray | None = None,
        least: float = 0.0,
    ) -> list[Answer]:
        """The best answers, at most `limit`. `paths`: wildcard patterns of files. `within`: the places of all that may be found.
        `least`: an answer's `match` at least. ValueError for a query without words.
        """
        if not texts.words(query):
            raise ValueError(f"the query must have a word, got {query!r}")
        places, words = self.places(paths), self.words.scores(ranking.telling(query))
        places = places if within is None else np.intersect1d(places, within)
        if not len(places):
            return []
        found = {} if mode == "semantic" else {"lexical": words}
        if mode != "lexical":
            assert self.encoder is not None, "semantic search needs an encoder"
            [self.query_vectors] = self.encoder.encode_queries([query])
            found["semantic"] = self.matrix.scores(self.query_vectors, places, words, limit)
        if mode == "hybrid":
            best, scores = self.ranked(query, places, found, max(RANKED, 2 * limit))
        else:
            scores = found[mode]
            best = places[scores[places] > 0] if mode == "lexical" else places
            scores = scores[best]
            if mode == "lexical" and len(best):
                scores = ranking.exact_symbol(scores, best, self.units, ranking.Asked(query, words))
        order = maxsim.top(scores, limit)
        answers = self.answers(best[order], scores[order], found)
        return [each for each in self.matched(query, answers) if each.match >= least]

    def ranked(self, query: str, places: np.ndarray, found: dict[str, np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
        """(places, scores): the `count` best by the sum of both searches and those that the query names, ordered by titles and
        the rules, too.
        """
        weight, meaning, words = ranking.share(query, self.weight), *map(lexical.zscores, (found["semantic"], found["lexical"]))
        sums = weight * meaning + (1 - weight) * words
        best = np.sort(places[maxsim.top(sums[places], count)])
        for symbol in ranking.symbols(query):
            best = np.union1d(best, np.intersect1d(places, np.flatnonzero(self.units.called(symbol))))
        titles = self.title_scores(best)
        spread = np.nanstd(titles) if np.isfinite(titles).any() else 0.0
        # A unit without a title counts as one with the mean.
        title = np.nan_to_num((titles - np.nanmean(titles)) / spread) if spread > 0 else np.zeros(len(best))
        scores = weight * (meaning[best] + title) / 2 / ranking.TITLES + (1 - weight) * words[best]
        return best, ranking.reorder(scores, best, self.units, ranking.Asked(query, found["lexical"]))

    def title_scores(self, places: np.ndarray) -> np.ndarray:
        """MaxSim of the last query with the titles of units; nan for one without."""
        scores = np.full(len(places), np.nan, np.float32)
        titled = [number for number, place in enumerate(places.tolist()) if self.titles[place]]
        if titled:
            matrix = self.read([self.titles[places[number]] for number in titled])
            scores[titled] = matrix.scores([self.query_vectors])[0]
        return scores

    def matched(self, query: str, answers: list[Answer]) -> list[Answer]:
        places = np.array([each.place for each in answers], np.int64)
        shared = [ranking.coverage(query, words) for words in self.words.words(places)]
        if not answers or answers[0].semantic is None:
            return [replace(each, match=share) for each, share in zip(answers, shared, strict=True)]
        titles = self.title_scores(places)
        return [
            replace(each, match=float((code := each.semantic or 0.0) + (code if np.isnan(title) else title) + share) / 3)
            for each, title, share in zip(answers, titles.tolist(), shared, strict=True)
        ]

    def answers(self, places: np.ndarray, scores: np.ndarray, found: dict[str, np.ndarray]) -> list[Answer]:
        rows = self.rows.take(places).to_pylist()
        return [
            Answer(row, place, score, **{name: float(each[place]) for name, each in found.items()})
            for row, place, score in zip(rows, places.tolist(), scores.tolist(), strict=True)
        ]

    def places(self, paths: Sequence[str]) -> np.ndarray:
        """Of the units in the files that match one of these wildcard patterns; all for none. Raises ValueError if no
        file does.
        """
        if not paths:
            return np.arange(len(self.ids))
        files = self.rows["path"].combine_chunks().dictionary_encode()
        matching = np.array([any(fnmatchcase(name, each) for each in paths) for name in files.dictionary.to_pylist()])
        if not matching.any():
            wanted, example = " or ".join(map(repr, paths)), files.dictionary[0].as_py()
            raise ValueError(f"no file matches {wanted}; paths are such as {example!r}")
        return np.flatnonzero(matching[files.indices.to_numpy()])

    def place_at(self, file: Path, line: int) -> int | None:
        """Of the smallest unit that holds this line, from 1; None if there is none."""
        first, last = (self.rows[name].to_numpy() for name in ("first_line", "last_line"))
        there = pc.equal(self.rows["file"], str(file)).to_numpy() & (first <= line) & (line <= last)
        around = np.flatnonzero(there)
        return int(around[np.argmin((last - first)[around])]) if len(around) else None

    def related(self, place: int, limit: int) -> list[Answer]:
        """The units most like that at `place`, by its stored vectors; itself left out."""
        others = np.delete(np.arange(len(self.ids)), place)
        scores = self.matrix.scores(self.document(place), others, np.zeros(len(self.ids)), limit)
        best = others[maxsim.top(scores[others], limit)]
        return self.answers(best, scores[best], {"semantic": scores})

    def explain(self, answer: Answer, query_tokens: list[str], document_tokens: list[str]) -> list[tuple[str, str, float]]:
        """(query token, best document token, product) of the last search with the encoder; texts in the order of the vectors."""
        best, products = maxsim.matches(self.query_vectors, self.document(answer.place))
        return [
            (query_tokens[number], document_tokens[place], float(product))
            for number, (place, product) in enumerate(zip(best.tolist(), products.tolist(), strict=True))
        ]


STAGE = Stage(
    reads=(VECTORS, UNITS, SOURCES),
    writes=INDEX,
    config=IndexConfig,
    optional=(RANKS,),
    wants=wanted_index,
    run=list_units,
    finish=write_index,
    forecast=forecast,
    divisible=False,
    version=3,  # 2: one vector of a unit instead of those of all its tokens; 3: numbers of units in the word index
)
