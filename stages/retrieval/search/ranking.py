"""The order of answers: how much words and meaning count for a query, and the rules that follow their sum.

The numbers were chosen on the questions in tests/bench/questions.jsonl and on docstrings of eight packages as queries; the page
data/docs/code.md says what each rule changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.retrieval import texts

SENTENCE, SYMBOL = 0.7, 0.3  # share of the semantic scores for a query of several words, and for an identifier alone
TITLES = 0.8  # divides the mean of the scores of a document's code and of its title, whose spread is smaller than that of one

# parse_date, JSONDecoder.decode, Stack::push, $scope, main()
IDENTIFIER = re.compile(r"[$@]?[A-Za-z_]\w*(?:(?:\.|::|->|#)[A-Za-z_]\w*)*(?:\(\))?")
TELLING = re.compile(r"[a-z][A-Z]|[A-Z]{2}|_|\.\w|::|->|\w#|\d|\(\)|^[$@]")  # in an identifier among words of a sentence
ASIDE = re.compile(  # folders and files of tests and examples
    r"(^|/)(__tests__|tests?|testing|specs?|examples?|samples?|demos?|benchmarks?|fixtures?)/|(^|/)(test_[^/]*|conftest)$|[_.-](tests?|spec)$",
    re.IGNORECASE,
)
ABOUT = re.compile(r"\b(tests?|testing|tested|specs?|examples?|samples?|demos?|benchmarks?|fixtures?)\b|\btest_", re.IGNORECASE)


def share(query: str, sentence: float = SENTENCE) -> float:
    """Of the semantic scores in the sum. `sentence`: for a query of several words."""
    return SYMBOL if IDENTIFIER.fullmatch(query.strip()) else sentence


class Units:
    """What the rules know of each unit. `paths` begin with the name of their root; `names` are qualified; `signatures` are empty
    for what is neither function nor class.
    """

    def __init__(self, paths: pa.ChunkedArray, names: pa.ChunkedArray, signatures: pa.ChunkedArray) -> None:
        files = paths.combine_chunks().dictionary_encode()
        self.files, self.names = files.indices.to_numpy(), names
        below = (PurePosixPath(path.partition("/")[2]).with_suffix("") for path in files.dictionary.to_pylist())
        self.aside = np.array([bool(ASIDE.search(str(path))) for path in below], bool)[self.files]
        statements = pc.equal(signatures, "").to_numpy()
        parsed = np.bincount(self.files[~statements], minlength=len(files.dictionary)) > 0
        data = np.array([PurePosixPath(path).suffix.lower() in texts.DATA for path in files.dictionary.to_pylist()], bool)
        special = pc.match_substring_regex(names, r"(^|\.)__\w+__$").to_numpy().astype(bool)
        self.minor = statements & (parsed | data)[self.files] | special

    def called(self, symbol: str) -> np.ndarray:
        """Whether a unit has this name: that of push is also Stack.push, that of Stack.push only that."""
        parts = re.split(r"\.|::|->|#", symbol.strip("$@").removesuffix("()"))
        name = re.escape(".".join(parts))
        found: np.ndarray = pc.match_substring_regex(self.names, rf"(^|\.|, ){name}(,|$)").to_numpy().astype(bool)
        return found


def symbols(query: str) -> list[str]:
    """The words of a query that are identifiers."""
    words = [word for word in query.replace(",", " ").split() if IDENTIFIER.fullmatch(word)]
    return words if len(query.split()) == 1 else [word for word in words if TELLING.search(word)]


FILE = 0.1  # share of the best other answer of its file that each gets
LESS = 0.75  # factor of tests and examples
MINOR = 0.8  # factor of statements beside functions, of configuration, and of special methods
WORDED = 1.0  # by which a unit rises whose name has all words of the query
FREE, LATER = 3, 0.8  # answers of a file that count in full; the factor of each further one, as often as it is further
NAMED = 1.0  # by which a unit rises that a sentence names

Rule = Callable[[np.ndarray, np.ndarray, Units, str], np.ndarray]  # of the scores of units, their places, all units, the query


def file_coherence(scores: np.ndarray, places: np.ndarray, units: Units, query: str) -> np.ndarray:
    """A unit rises a little with the best other one of its file."""
    best: dict[int, list[float]] = {}
    files = units.files[places].tolist()
    for file, score in zip(files, scores.tolist(), strict=True):
        best[file] = sorted([*best.get(file, []), score], reverse=True)[:2]
    other = [
        (found[1] if score == found[0] else found[0]) if len(found := best[file]) > 1 else 0.0
        for file, score in zip(files, scores.tolist(), strict=True)
    ]
    return scores + FILE * np.maximum(other, 0)


def name_words(scores: np.ndarray, places: np.ndarray, units: Units, query: str) -> np.ndarray:
    """A unit rises with the share of the query's words that its name and its class's have."""
    asked = stems(texts.words(query))
    shared = [len(asked & stems(texts.words(name))) for name in units.names.take(places).to_pylist()]
    return scores + WORDED * np.array(shared) / max(1, len(asked))


def minor_down(scores: np.ndarray, places: np.ndarray, units: Units, query: str) -> np.ndarray:
    """Statements beside functions, such as constants and imports, configuration and special methods such as __init__ count four
    fifths.
    """
    return np.where(units.minor[places] & (scores > 0), MINOR * scores, scores)


def tests_down(scores: np.ndarray, places: np.ndarray, units: Units, query: str) -> np.ndarray:
    """Tests and examples count three quarters, unless the query is about such."""
    if ABOUT.search(query):
        return scores
    return np.where(units.aside[places] & (scores > 0), LESS * scores, scores)


def later_down(scores: np.ndarray, places: np.ndarray, units: Units, query: str) -> np.ndarray:
    """From the fourth answer of a file on, each counts less: that one four fifths, the next four fifths of that, and so on."""
    seen: dict[int, int] = {}
    found = scores.copy()
    for number in np.argsort(-scores, kind="stable").tolist():
        file = int(units.files[places[number]])
        seen[file] = seen.get(file, 0) + 1
        found[number] *= LATER ** max(0, seen[file] - FREE) if found[number] > 0 else 1
    return found


def exact_symbol(scores: np.ndarray, places: np.ndarray, units: Units, query: str) -> np.ndarray:
    """A unit that a sentence names by its identifier rises; if the query is nothing else, it comes first."""
    rise = scores.max() - scores.min() + 1 if len(query.split()) == 1 else NAMED
    found = scores.copy()
    for symbol in symbols(query):
        found[units.called(symbol)[places]] += rise
    return found


RULES: tuple[Rule, ...] = (name_words, minor_down, file_coherence, tests_down, later_down, exact_symbol)


def reorder(scores: np.ndarray, places: np.ndarray, units: Units, query: str, rules: Sequence[Rule] = RULES) -> np.ndarray:
    """`scores`: sums of z-scores of the units at `places`."""
    for rule in rules:
        scores = rule(scores, places, units, query)
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
def stem(word: str) -> str:
    return next((word.removesuffix(end) for end in ENDINGS if word.endswith(end) and len(word) - len(end) >= 3), word)
