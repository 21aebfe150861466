"""Judge one pair of a query and a document by itself: is the query one that a person could ask, and which split is it in."""

from __future__ import annotations

import hashlib
import re

from stages.retrieval import texts

# Docstrings that say nothing about what their function does.
BOILERPLATE = re.compile(
    r"^(todo|fixme|xxx|deprecated|obsolete|see\b|same as\b|like\b.*\bexcept\b|alias (of|for)\b|inherit(s|ed)? |overrid(es?|den)$|"
    r"overrid(es?|den) (the )?(base|parent|super|method)|(the )?constructor\b|(private|internal|helper)( \w+)?( \w+)?[.]?$|"
    r"(initiali[sz]e|init)s?( (self|the (class|object|instance)))?[.:]?(\s+see help.*)?$|"
    r"implements? the\b.*\b(interface|protocol|method)\b|required by\b|not (yet )?implemented|dummy\b|placeholder\b|undocumented)"
    r"(?=\W|$)",
    re.IGNORECASE,
)


def overlap(query: str, document: str) -> float:
    """Share of the query's distinct content words in the document, 0 to 1; 0 without content words."""
    asked = texts.content_words(query)
    return len(asked & set(texts.words(document))) / len(asked) if asked else 0.0


def is_vague(query: str, least_words: int) -> bool:
    """It would fit many functions: too few words, or a phrase such as "Constructor"."""
    return len(query.split()) < least_words or BOILERPLATE.search(query) is not None


def reason_against(
    query: str, document: str, body_lines: int, *, query_words: tuple[int, int], min_body_lines: int
) -> tuple[str, str] | None:
    """(value of `rejected`, sentence for the user), or None. `query_words`: fewest and most."""
    count = len(query.split())
    if count < query_words[0]:
        return "short_query", f"{count} words, fewer than pairs.min_query_words = {query_words[0]}"
    if count > query_words[1]:
        return "long_query", f"{count} words, more than pairs.max_query_words = {query_words[1]}"
    if body_lines < min_body_lines:
        return "short_body", f"{body_lines} lines of code, fewer than pairs.min_body_lines = {min_body_lines}"
    if found := BOILERPLATE.search(query):
        return "boilerplate", f'it begins "{found[0]}", which tells nothing about the code'
    if " ".join(query.split()).lower() in " ".join(document.split()).lower():
        return "verbatim", "the query stands in the code word for word"
    return None


def split_of(text: str, valid: float, test: float) -> str:
    """By a hash of `text`, so that a split does not change when pairs come or go."""
    place = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) / 16**12
    return "test" if place < test else "valid" if place < test + valid else "train"
