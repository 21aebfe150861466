"""How queries and documents are written as text, how their ids are formed, and how they are split into words for lexical
search.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from typing import Literal

Role = Literal["query", "document"]

BASE = "base"  # the name of the encoder that no training has changed; a tuned one is named by its adapter's sha256

# Where an identifier is split: parseHTTPHeader_2 is parse, HTTP, Header, 2.
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])|[\W_]+")
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)\s+(?=[A-Z`\"'(\[])")
# Where the prose of a docstring ends: a heading, a field, a doctest, a directive or an underline.
SECTION = re.compile(
    r"^\s*(parameters?|args|arguments|keyword args|returns?|yields?|raises|examples?|notes?|references|see also|attributes|usage|"
    r"warnings?|todo)\b\s*:?\s*$|^\s*[:@]\w+|^\s*>>>|^\s*\.\. |^\s*[-=~*+#]{3,}\s*$",
    re.IGNORECASE | re.MULTILINE,
)
# fmt: off
FUNCTION_WORDS = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "by", "can", "for", "from", "given", "has", "if", "in", "into", "is", "it", "its",
    "of", "on", "or", "otherwise", "return", "returns", "self", "that", "the", "this", "to", "which", "with",
})
# fmt: on


def text_id(role: Role, text: str) -> str:
    return hashlib.sha256(f"{role}\n{text}".encode()).hexdigest()


def vector_id(encoder: str, text_id: str) -> str:
    return hashlib.sha256(f"{encoder}\n{text_id}".encode()).hexdigest()


def document(module: str, qualified_name: str, rest: str) -> str:
    """What the encoder reads of a unit: "json.decoder JSONDecoder.decode(self, s): ...". `rest` is the code after the name."""
    return f"{module} {qualified_name}{rest}".strip()


def without_name(text: str, name: str) -> str:
    """With "f" for every whole word `name`."""
    return re.sub(rf"\b{re.escape(name)}\b", "f", text) if name else text


def words(text: str) -> list[str]:
    """In lower case; parseHTTPHeader_2 is parse, http, header, 2."""
    return [word.lower() for word in HUMP.split(text) if word]


def content_words(text: str) -> set[str]:
    """Without function words and single characters."""
    return {word for word in words(text) if len(word) > 1 and word not in FUNCTION_WORDS}


def first_sentence(docstring: str) -> str | None:
    """On one line; None if there is no prose before the first heading, parameter list, doctest or directive."""
    text = inspect.cleandoc(docstring)
    section = SECTION.search(text)
    prose = (text[: section.start()] if section else text).strip()
    paragraph = " ".join(re.split(r"\n\s*\n", prose)[0].split())
    return SENTENCE_END.split(paragraph)[0] or None
