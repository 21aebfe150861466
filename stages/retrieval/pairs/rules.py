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
    """Return the share of the query's distinct content words that occur in `document`, 0 to 1. If the query has no
    content words, the share is 0.
    """
    asked = texts.content_words(query)
    return len(asked & set(texts.words(document))) / len(asked) if asked else 0.0


def is_vague(query: str, least_words: int) -> bool:
    """Return True if `query` would fit many functions. It then has fewer words than `least_words`, or it begins with a phrase
    that tells nothing about the code, such as "Constructor".
    """
    return len(query.split()) < least_words or BOILERPLATE.search(query) is not None


def reason_against(
    query: str, document: str, body_lines: int, *, query_words: tuple[int, int], min_body_lines: int
) -> tuple[str, str] | None:
    """Return why a pair is rejected, or None if it may be used. A reason is a tuple `(code, sentence)`. `code` is the
    value for the column `rejected`, and `sentence` explains it to the user. `query_words` is the smallest and the
    largest number of words that a query may have. `body_lines` is the number of lines of code in the document's body.
    `min_body_lines` is the smallest number allowed.
    """
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
    """Return the split to which the hash of a text assigns it: "test", "valid" or "train". `valid` and `test` are the shares of
    these splits, 0 to 1.
    """
    place = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) / 16**12
    return "test" if place < test else "valid" if place < test + valid else "train"
