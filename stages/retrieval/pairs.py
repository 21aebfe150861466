"""The stage `pairs`: one row per unit with a docstring. The first sentence is the query, the unit's code the document."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from schemas.retrieval import PAIRS, UNITS
from stages.hashing import text_sha256
from stages.retrieval import texts
from stages.retrieval.texts import Row
from stages.run import Run
from stages.settings import COUNT, WHOLE, Section, runtime, selects, setting
from stages.stage import Stage

# Docstrings that say nothing about what their function does.
BOILERPLATE = re.compile(
    r"^(todo|fixme|xxx|deprecated|obsolete|see\b|same as\b|like\b.*\bexcept\b|alias (of|for)\b|inherit(s|ed)? |overrid(es?|den)$|"
    r"overrid(es?|den) (the )?(base|parent|super|method)|(the )?constructor\b|(private|internal|helper)( \w+)?( \w+)?[.]?$|"
    r"(initiali[sz]e|init)s?( (self|the (class|object|instance)))?[.:]?(\s+see help.*)?$|"
    r"implements? the\b.*\b(interface|protocol|method)\b|required by\b|not (yet )?implemented|dummy\b|placeholder\b|undocumented)"
    r"(?=\W|$)",
    re.IGNORECASE,
)

# fmt: off
FUNCTION_WORDS = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "by", "can", "for", "from", "given", "has", "if", "in", "into", "is", "it", "its",
    "of", "on", "or", "otherwise", "return", "returns", "self", "that", "the", "this", "to", "which", "with",
})
# fmt: on


def overlap(query: str, document: str) -> float:
    """Share of the query's distinct words in the document, 0 to 1, without function words and single characters."""
    asked = {word for word in texts.words(query) if len(word) > 1} - FUNCTION_WORDS
    return len(asked & set(texts.words(document))) / len(asked) if asked else 0.0


def split_of(text: str, valid: float, test: float) -> str:
    """By a hash of `text`, so that a split does not change when pairs come or go."""
    place = int(text_sha256(text)[:12], 16) / 16**12
    return "test" if place < test else "valid" if place < test + valid else "train"


GRAM = 3  # words of a gram, by which documents are compared


def groups(keys: Iterable[Sequence[Hashable]]) -> list[int]:
    """Group of each item, as the index of the group's first. Items with a common key are in one group, also through others."""
    parent: list[int] = []
    first: dict[Hashable, int] = {}

    # Union-find with path halving. The root is always the smallest index.
    def top(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for item, own in enumerate(keys):
        parent.append(item)
        for key in own:
            one, other = sorted((top(item), top(first.setdefault(key, item))))
            parent[other] = one
    return [top(item) for item in range(len(parent))]


def leaks(documents: Sequence[str], held_out: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(largest Jaccard similarity of word trigrams with a held-out text, its index) per document; 0 and 0 if none is shared."""
    likeness, position = np.zeros(len(documents), np.float32), np.zeros(len(documents), np.int32)
    postings: dict[tuple[str, ...], list[int]] = defaultdict(list)
    sizes = np.zeros(max(1, len(held_out)))
    for number, text in enumerate(held_out):
        for gram in (own := _grams(text)):
            postings[gram].append(number)
        sizes[number] = len(own)
    for number, text in enumerate(documents):
        own = _grams(text)
        shared = [np.array(postings[gram]) for gram in own if gram in postings]
        if shared:
            common = np.bincount(np.concatenate(shared), minlength=len(sizes))
            found = common / (sizes + len(own) - common)
            position[number] = int(np.argmax(found))
            likeness[number] = found[position[number]]
    return likeness, position


def _grams(text: str) -> set[tuple[str, ...]]:
    words = texts.words(text)
    return {tuple(words[start : start + GRAM]) for start in range(len(words) - GRAM + 1)}


KEPT = ("pair_id", "unit_id", "package", "query", "query_id", "text_id")  # the columns that come from the unit alone
AMONG = (None, "duplicate", "leak")  # the values of `rejected` that depend on other pairs


@dataclass(frozen=True)
class PairsConfig(Section):
    split: Literal["module", "unit"] = setting(
        "module",
        "what falls into a split as a whole: module, so that the test is code of other top-level modules; or unit, so that the "
        "encoder is tuned to the very code base that is searched",
    )
    test: float = setting(
        0.25, "share of the test split, 0 to 1: hundreds of queries give useful intervals", unit="share", bounds=(0.0, 0.9999999)
    )
    valid: float = setting(
        0.1, "share of the validation split, 0 to 1, on which settings are chosen", unit="share", bounds=(0.0, 0.9999999)
    )
    min_query_words: int = setting(3, "fewest words of a query", unit="words", bounds=COUNT)
    max_query_words: int = setting(40, "most words of a query", unit="words", bounds=COUNT)
    min_body_lines: int = setting(5, "fewest lines of code in a body, docstring excluded", unit="lines", bounds=(0, WHOLE[1]))
    max_leak: float = setting(
        0.5,
        "a train pair is not used if its document is more like a document of valid or test than this, Jaccard of trigrams",
        unit="share",
        bounds=(0.0, 1.0),
    )
    queries: bool = selects(
        True, "docstrings become queries; false where nothing is tuned or evaluated, as under `latentmill find`"
    )
    batch_size: int = runtime(512, "pairs per record batch, which a kill can lose", unit="pairs", bounds=COUNT)

    def check(self) -> None:
        if self.test + self.valid >= 1:
            raise ValueError(f"test must be < {1 - self.valid:g}, so that pairs are left to train on, got {self.test}")
        if self.max_query_words < self.min_query_words:
            raise ValueError(f"max_query_words must be >= {self.min_query_words}, got {self.max_query_words}")


def wanted_pairs(run: Run[PairsConfig]) -> pa.Table:
    """The columns KEPT of every unit with a docstring."""
    return PAIRS.select(list(run.once(_units).values()), KEPT)


def _units(run: Run[PairsConfig]) -> dict[str, Row]:
    """The units with a docstring, in document order, with `pair_id` and `query_id`."""
    columns = ["unit_id", "path", "qualified_name", "package", "first_line", "code_lines", "query", "body", "text", "text_id"]
    found: dict[str, Row] = {}
    if not run.config.queries:
        return found
    for row in sorted(run.inputs.rows(UNITS).select(columns).to_pylist(), key=texts.document_order):
        if query := row["query"]:
            ids = {"pair_id": text_sha256(row["unit_id"], query), "query_id": texts.text_id("query", query)}
            found[row["unit_id"]] = row | ids
    return found


def judge_pairs(run: Run[PairsConfig]) -> Iterator[pa.RecordBatch]:
    """Each pair by itself; `finish_pairs` compares pairs."""
    units = run.once(_units)
    for some in run.report.batches(run.output.pending["unit_id"].to_pylist(), run.config.batch_size, "pairs"):
        yield PAIRS.record_batch(pair_row(units[unit_id], run.config) for unit_id in some)


def pair_row(unit: Row, config: PairsConfig) -> Row:
    place = unit["package"] if config.split == "module" else f"{unit['path']} {unit['qualified_name']}"
    split, shared = split_of(place, config.valid, config.test), overlap(unit["query"], unit["text"])
    found = reason_against(unit["query"], unit["text"], unit["code_lines"], config)
    if not found and split == "train" and not shared:
        found = "no_overlap", "no word of the query occurs in the code, which teaches little"
    rejected, detail = found or (None, "")
    judged = {"split": split, "overlap": shared, "leak": 0.0, "rejected": rejected, "detail": detail}
    return {**{name: unit[name] for name in KEPT}, **judged, "duplicate_group": unit["pair_id"]}


def reason_against(query: str, document: str, body_lines: int, config: PairsConfig) -> tuple[str, str] | None:
    """(value of `rejected`, sentence for the user), or None."""
    count = len(query.split())
    if count < config.min_query_words:
        return "short_query", f"{count} words, fewer than pairs.min_query_words = {config.min_query_words}"
    if count > config.max_query_words:
        return "long_query", f"{count} words, more than pairs.max_query_words = {config.max_query_words}"
    if body_lines < config.min_body_lines:
        return "short_body", f"{body_lines} lines of code, fewer than pairs.min_body_lines = {config.min_body_lines}"
    if found := BOILERPLATE.search(query):
        return "boilerplate", f'it begins "{found[0]}", which tells nothing about the code'
    if " ".join(query.split()).lower() in " ".join(document.split()).lower():
        return "verbatim", "the query stands in the code word for word"
    return None


def finish_pairs(run: Run[PairsConfig]) -> Iterator[pa.RecordBatch]:
    units = run.once(_units)
    if not run.config.queries:
        return
    stored = {row["unit_id"]: row for row in run.output.stored.select(PAIRS.batch.names).to_pylist()}
    # The run was stopped before all pairs were judged.
    if not units.keys() <= stored.keys():
        return
    rows = [stored[unit_id] for unit_id in units]
    judged = mark_leaks(mark_duplicates(rows, units, run.config), units, run.config.max_leak)
    if changed := [new for new, old in zip(judged, rows, strict=True) if new != old]:
        yield PAIRS.record_batch(changed)
    _summarise(run, judged)


def mark_duplicates(rows: list[Row], units: dict[str, Row], config: PairsConfig) -> list[Row]:
    """Copies of the rows. Pairs with a common query or body are a group: the first that no other rule rejects is used.

    All get the first pair's id as `duplicate_group`, whether it is used or not. Earlier "duplicate" and "leak" are judged anew.
    """
    keys = [shared_keys(row["query"], units[row["unit_id"]], config) for row in rows]
    taken: set[int] = set()
    found = []
    for row, group in zip(rows, groups(keys), strict=True):
        new = row | {"duplicate_group": rows[group]["pair_id"], "leak": 0.0}
        if row["rejected"] in AMONG:
            first = units[rows[group]["unit_id"]]
            detail = f"the query or the body is that of {first['path']}, line {first['first_line']}, or of its duplicates"
            new |= {"rejected": "duplicate", "detail": detail} if group in taken else {"rejected": None, "detail": ""}
            taken.add(group)
        found.append(new)
    return found


def shared_keys(query: str, unit: Row, config: PairsConfig) -> list[tuple[str, ...]]:
    # Vague queries and short bodies would link functions that have nothing to do with each other.
    vague = len(query.split()) < config.min_query_words or BOILERPLATE.search(query)
    keys = [] if vague else [("query", *texts.words(query))]
    keys += [("body", *unit["body"].split())] if unit["code_lines"] >= config.min_body_lines else []
    return [key for key in keys if len(key) > 1]


def mark_leaks(rows: list[Row], units: dict[str, Row], limit: float) -> list[Row]:
    """Reject train pairs whose body has a Jaccard similarity of trigrams above `limit` with a usable pair of valid or test."""
    used = [row for row in rows if row["rejected"] is None]
    held_out = [units[row["unit_id"]] for row in used if row["split"] != "train"]
    train = [row for row in used if row["split"] == "train"]
    # site-packages holds forks of modules of the standard library, such as setuptools/_distutils.
    likeness, position = leaks([units[row["unit_id"]]["body"] for row in train], [unit["body"] for unit in held_out])
    marked = {}
    for row, value, place in zip(train, likeness.tolist(), position.tolist(), strict=True):
        marked[row["pair_id"]] = row | {"leak": value}
        if value > limit:
            other = held_out[place]
            detail = f"its body is like {other['path']}, line {other['first_line']}, which is held out: Jaccard {value:.2f}"
            marked[row["pair_id"]] |= {"rejected": "leak", "detail": detail}
    return [marked.get(row["pair_id"], row) for row in rows]


def _summarise(run: Run[PairsConfig], rows: list[Row]) -> None:
    if not rows:
        run.report.say("no unit has a docstring: there is nothing to tune the encoder with, or to evaluate the search by")
        return
    splits = Counter(row["split"] for row in rows if not row["rejected"])
    reasons = sorted(Counter(row["rejected"] for row in rows if row["rejected"]).items())
    counts = ", ".join(f"{splits[split]} {split}" for split in ("train", "valid", "test"))
    run.report.say(f"{len(rows)} pairs: {counts}{''.join(f', {count} {reason}' for reason, count in reasons)}")
    if not all(splits[split] for split in ("train", "valid", "test")):
        packages = len({row["package"] for row in rows})
        remedy = (
            'pairs.split = "unit" splits within a module' if run.config.split == "module" else "set pairs.valid and pairs.test"
        )
        run.report.say(f"a split is empty: the pairs are of {packages} top-level modules; {remedy}")


STAGE = Stage(
    reads=(UNITS,),
    writes=PAIRS,
    unit="function",
    config=PairsConfig,
    wants=wanted_pairs,
    run=judge_pairs,
    finish=finish_pairs,
    version=2,  # 2: short bodies and vague queries make no duplicates
)
