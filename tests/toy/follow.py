"""How `latentmill follow` traces one line through the tables of the toy pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from stages.stage import Chain, Query, Row


def find_line(query: Query, need: Callable[[str], Any], text: str) -> list[dict[str, Any]]:
    """Return the lines that contain the text."""
    return query("select * from lines where contains(text, $text) order by path, number", text=text)


def describe_line(query: Query, line: Row) -> Iterator[str]:
    """Yield the line with its path and number."""
    yield f"{line['path']}:{line['number']}: {line['text']}"


def describe_tokens(query: Query, line: Row) -> Iterator[str]:
    """Yield the number of tokens."""
    (row,) = query("select ids_shape[1] as count from tokens where line_id = $id", id=line["line_id"])
    yield f"{row['count']} tokens"


CHAIN = Chain("lines", "text", "part of a line", find_line, {"lines": describe_line, "tokens": describe_tokens})
