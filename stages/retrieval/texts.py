"""Queries and documents: their text, ids, order and words, and the pairs of them that are used."""

from __future__ import annotations

import codecs
import inspect
import re
from contextlib import suppress
from typing import Any, Literal

import pyarrow as pa

from stages.hashing import text_sha256

Role = Literal["query", "document"]
Row = dict[str, Any]

BASE = "base"  # the name of the encoder that no training has changed; a tuned one is named by its adapter's sha256
DATA = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}  # languages of configuration, by suffix
HELD_OUT = ("valid", "test")  # the splits that are not trained on

# Where an identifier is split: parseHTTPHeader_2 is parse, HTTP, Header, 2.
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])|[\W_]+")
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)\s+(?=[A-Z`\"'(\[])")
# Where the prose of a docstring ends: a heading, a field, a doctest, a directive or an underline.
SECTION = re.compile(
    # [^\S\n] and not \s: blank lines must not be read again from each of them.
    r"^[^\S\n]*(?:(?:parameters?|args|arguments|keyword args|returns?|yields?|raises|examples?|notes?|references|see also|"
    r"attributes|usage|warnings?|todo)\b[^\S\n]*:?[^\S\n]*$|[:@]\w+|>>>|\.\. |[-=~*+#]{3,}[^\S\n]*$)",
    re.IGNORECASE | re.MULTILINE,
)


# An encoding that one of the first two lines declares, as Python and editors read it: # -*- coding: latin-1 -*-
DECLARED = re.compile(rb"\A(?:[^\n]*\n)?[ \t\f]*(?:#|//|/\*|--|%|\").*?coding[:=][ \t]*([-\w.]+)")
NO_CHARACTERS = {"idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape", "unicode-escape", "raw-unicode-escape"}
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decode(content: bytes) -> str:
    """A source file's text: UTF-8, or what a byte order mark or one of its first two lines says. Raises UnicodeDecodeError."""
    if content.startswith(UTF_16):
        return content.decode("utf-16")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        if declared := DECLARED.match(content):
            with suppress(LookupError):  # no such encoding
                if codecs.lookup(declared[1].decode()).name not in NO_CHARACTERS:
                    return content.decode(declared[1].decode())
        raise


LINE_END = re.compile(r"\r\n|\r|\n")  # as `ast` and editors count lines; str.splitlines knows more


def split_lines(text: str) -> list[str]:
    lines = LINE_END.split(text)
    return lines[:-1] if lines[-1] == "" else lines


def text_id(role: Role, text: str) -> str:
    return text_sha256(role, text)


def vector_id(encoder: str, text_id: str) -> str:
    return text_sha256(encoder, text_id)


def document_order(row: Row) -> tuple[Any, ...]:
    return row["path"], row["first_line"], row["unit_id"]


def used_pairs(pairs: pa.Table, *splits: str) -> list[Row]:
    """The rows of the table `pairs` that are not rejected, by pair_id; of all splits if none is named."""
    rows = [row for row in pairs.to_pylist() if row["rejected"] is None and (not splits or row["split"] in splits)]
    return sorted(rows, key=lambda row: str(row["pair_id"]))


def without_name(text: str, name: str) -> str:
    """With "f" for every whole word `name`."""
    return re.sub(rf"\b{re.escape(name)}\b", "f", text) if name else text


def words(text: str) -> list[str]:
    """In lower case; parseHTTPHeader_2 is parse, http, header, 2."""
    return [word.lower() for word in HUMP.split(text) if word]


def first_sentence(docstring: str) -> str | None:
    """On one line; None if there is no prose before the first heading, parameter list, doctest or directive."""
    text = inspect.cleandoc(docstring)
    section = SECTION.search(text)
    prose = (text[: section.start()] if section else text).strip()
    paragraph = " ".join(re.split(r"\n\s*\n", prose)[0].split())
    return SENTENCE_END.split(paragraph)[0] or None
