"""The order of answers: how much words and meaning count for a query, and the rules that follow their sum.

The numbers were chosen on questions (tests/bench/questions.jsonl), on docstrings of eight packages as queries, and on half of the
repositories of semble's benchmark; the page data/docs/code.md says what each rule changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.retrieval import texts

SENTENCE, SYMBOL = 0.65, 0.3  # share of the semantic scores for a query of several words, and for an identifier alone
TITLES = 0.8  # divides the mean of the scores of a document's code and of its title, whose spread is smaller than that of one

# parse_date, JSONDecoder.decode, Stack::push, $scope, main()
IDENTIFIER = re.compile(r"[$@]?[A-Za-z_]\w*(?:(?:\.|::|->|#)[A-Za-z_]\w*)*(?:\(\))?")
TELLING = re.compile(r"[a-z][A-Z]|[A-Z]{2}|_|\.\w|::|->|\w#|\d|\(\)|^[$@]")  # in an identifier among words of a sentence
# In the folders and names of files: tests, examples, and what is kept for old callers.
ASIDE = re.compile(
    r"(?i:(^|/)_?(__tests__|tests?|testing|test_suite|testdata|e2e|mocks?|specs?|examples?|samples?|demos?|benchmarks?|fixtures?|"
    r"deprecat\w*|legacy|compat\w*)_?/|(^|/)(test_[^/]*|conftest|_?(deprecat\w*|legacy|compat\w*))$|"
    r"[_.-](tests?|spec|testing|benchmarks?|mocks?)$)|[a-z](Tests?|Spec|Benchmark|Mock)$"
)
ABOUT = re.compile(
    r"\b(tests?|testing|tested|mock\w*|specs?|examples?|samples?|demos?|benchmarks?|fixtures?|deprecat\w*|legacy|compat\w*)\b|\btest_",
    re.IGNORECASE,
)


def share(query: str, sentence: float = SENTENCE) -> float:
    """Of the semantic scores in the sum. `sentence`: for a query of several words."""
    return SYMBOL if IDENTIFIER.fullmatch(query.strip()) else sentence


WHOLE = frozenset({"mod", "index", "__init__"})  # Rust, JavaScript, Python
BESIDE = frozenset({*texts.DATA, ".md", ".markdown"})  # suffixes of what lies beside the code


class Units:
    """What the rules know of each unit. `paths` begin with the name of their root; `names` are qualified; `signatures` are empty
    for what is neither function nor class.
    """

    def __init__(self, paths: pa.ChunkedArray, names: pa.ChunkedArray, signatures: pa.ChunkedArray) -> None:
        files = paths.combine_chunks().dictionary_encode()
        self.files, self.names = files.indices.to_numpy(), names
        below = [PurePosixPath(path.partition("/")[2]) for path in files.dictionary.to_pylist()]
        # The file of a whole folder has the folder's name.
        self.places = [path.parent if path.stem in WHOLE and path.parent.name else path.with_suffix("") for path in below]
        self.aside = np.array([bool(ASIDE.search(str(path))) for path in self.places], bool)[self.files]
        statements = pc.equal(signatures, "").to_numpy()
        parsed = np.bincount(self.files[~statements], minlength=len(below)) > 0
        data = np.array([path.suffix.lower() in BESIDE for path in below], bool)
        special = pc.match_substring_regex(names, r"(^|\.)__\w+__$").to_numpy().astype(bool)
        self.minor = statements & (parsed | data)[self.files] | special

    def called(self, symbol: str) -> np.ndarray:
        """Whether a unit has this name: that of push is also Stack.push, that of Stack.push only that."""
        name = re.escape(".".join(_parts(symbol)))
        found: np.ndarray = pc.match_substring_regex(self.names, rf"(^|\.|, ){name}(,|$)").to_numpy().astype(bool)
        return found


def _parts(symbol: str) -> list[str]:
    return re.split(r"\.|::|->|#", symbol.strip("$@").removesuffix("()"))


def _plain(name: str) -> str:
    return re.sub("[-_]", "", name.lower())


def symbols(query: str) -> list[str]:
    """The words of a query that are identifiers."""
    words = [word for word in query.replace(",", " ").split() if IDENTIFIER.fullmatch(word)]
    return words if len(query.split()) == 1 else [word for word in words if TELLING.search(word)]


WORDED = 1.2  # by which a unit rises whose name has all words of the query
FILE, FOLDER = 0.75, 0.25  # by which a unit rises if the query has all words of its file's name, and its folders all of the query
EVIDENCE = 1.0  # by which the units of that file rise in which full-text search finds most
MINOR = 0.7  # factor of texts, configuration and statements beside functions, and of special methods
LESS = 0.65  # factor of tests, examples and what is kept for old callers
NAMED = 1.0  # by which a unit rises that a sentence names, and beyond the others that a query names whose file is called so
LATER = 0.9  # factor of each further answer of a file, as often as it is further
BEGINNING = 5  # letters of a stem by which words of names are compared: connect, connection and connectors are alike


@dataclass(frozen=True)
class Asked:
    query: str
    words: np.ndarray  # scores of all units in full-text search


Rule = Callable[[np.ndarray, np.ndarray, Units, Asked], np.ndarray]  # of the scores of units, their places, all units


def name_words(scores: np.ndarray, places: np.ndarray, units: Units, asked: Asked) -> np.ndarray:
    """A unit rises with the share of the query's words that its name and its class's have."""
    words = beginnings(asked.query)
    shared = [len(words & beginnings(name)) for name in units.names.take(places).to_pylist()]
    return scores + WORDED * np.array(shared) / max(1, len(words))


def path_words(scores: np.ndarray, places: np.ndarray, units: Units, asked: Asked) -> np.ndarray:
    """A unit rises with the share of its file's name that the query has, and less with that of the query in its folders."""
    words, rise = beginnings(asked.query), np.zeros(len(units.places))
    for file in np.unique(units.files[places]).tolist():
        place = units.places[file]
        name, folders = beginnings(place.name), beginnings(str(place.parent))
        rise[file] = FILE * len(words & name) / max(1, len(name)) + FOLDER * len(words & folders) / max(1, len(words))
    return np.asarray(scores + rise[units.files[places]])


def file_evidence(scores: np.ndarray, places: np.ndarray, units: Units, asked: Asked) -> np.ndarray:
    """A unit rises with what full-text search finds in all units of its file together."""
    found = np.bincount(units.files, np.maximum(asked.words, 0), len(units.places))
    return np.asarray(scores + EVIDENCE * (found / (found.max() or 1))[units.files[places]])


def minor_down(scores: np.ndarray, places: np.ndarray, units: Units, asked: Asked) -> np.ndarray:
    """Texts, configuration, statements beside functions such as constants and imports, and special methods such as __init__ count
    less.
    """
    return np.where(units.minor[places] & (scores > 0), MINOR * scores, scores)


def aside_down(scores: np.ndarray, places: np.ndarray, units: Units, asked: Asked) -> np.ndarray:
    """Tests, examples and what is kept for old callers count less, unless the query is about such."""
    if ABOUT.search(asked.query):
        return scores
    return np.where(units.aside[places] & (scores > 0), LESS * scores, scores)


def exact_symbol(scores: np.ndarray, places: np.ndarray, units: Units, asked: Asked) -> np.ndarray:
    """A unit that a sentence names by its identifier rises; if the query is nothing else, it comes first, before all that of a
    file with this name.
    """
    alone = len(asked.query.split()) == 1
    found = scores.copy()
    for symbol in symbols(asked.query):
        called = np.flatnonzero(units.called(symbol)[places])
        found[called] += scores.max() - scores.min() + 1 if alone else NAMED
        if alone:
            files = [units.places[file].name for file in units.files[places[called]].tolist()]
            found[called] += [NAMED * (_plain(name) == _plain(_parts(symbol)[-1])) for name in files]
    return found


def later_down(scores: np.ndarray, places: np.ndarray, units: Units, asked: Asked) -> np.ndarray:
    """Each further answer of a file counts nine tenths of the one before."""
    seen: dict[int, int] = {}
    found = scores.copy()
    for number in np.argsort(-scores, kind="stable").tolist():
        file = int(units.files[places[number]])
        found[number] *= LATER ** seen.get(file, 0) if found[number] > 0 else 1
        seen[file] = seen.get(file, 0) + 1
    return found


RULES: tuple[Rule, ...] = (name_words, path_words, file_evidence, minor_down, aside_down, exact_symbol, later_down)


def reorder(scores: np.ndarray, places: np.ndarray, units: Units, asked: Asked, rules: Sequence[Rule] = RULES) -> np.ndarray:
    """`scores`: sums of z-scores of the units at `places`."""
    for rule in rules:
        scores = rule(scores, places, units, asked)
    return scores


# fmt: off
FUNCTION_WORDS = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "by", "can", "do", "does", "for", "from", "given", "has", "how", "i", "if", "in",
    "into", "is", "it", "its", "my", "of", "on", "or", "otherwise", "return", "returns", "self", "that", "the", "this", "to",
    "what", "when", "where", "which", "with", "without",
})
# fmt: on
ENDINGS = ("ing", "ed", "es", "s", "e")


def telling(query: str) -> str:
    """A query without its function words, which rank documents by what they happen to say; the query, if it has no others."""
    return " ".join(word for word in texts.words(query) if word not in FUNCTION_WORDS) or query


def coverage(query: str, words: str) -> float:
    """Share of the query's words, function words left out, that `words` holds in some form, 0 to 1."""
    asked = stems(texts.words(query))
    return len(asked & stems(words.split())) / len(asked) if asked else 0.0


def stems(words: Iterable[str]) -> set[str]:
    """Without function words."""
    return {stem(word) for word in {*words} - FUNCTION_WORDS}


@lru_cache(1 << 16)
def beginnings(text: str) -> frozenset[str]:
    """Of the stems of its words."""
    return frozenset(word[:BEGINNING] for word in stems(texts.words(text)))


@lru_cache(1 << 16)
def stem(word: str) -> str:
    return next((word.removesuffix(end) for end in ENDINGS if word.endswith(end) and len(word) - len(end) >= 3), word)
