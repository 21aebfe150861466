"""How `latentmill follow` traces one line through the tables of the toy pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from stages.stage import Ask, Chain, Row


def find_line(ask: Ask, need: Callable[[str], Any], text: str) -> list[dict[str, Any]]:
    """Return the lines that contain the text."""
    return ask("select * from lines where contains(text, $text) order by path, number", text=text)


def tell_line(ask: Ask, line: Row) -> Iterator[str]:
    """Yield the line and where it stands."""
    yield f"{line['path']}:{line['number']}: {line['text']}"


def tell_tokens(ask: Ask, line: Row) -> Iterator[str]:
    """Yield the number of tokens."""
    (row,) = ask("select ids_shape[1] as count from tokens where line_id = $id", id=line["line_id"])
    yield f"{row['count']} tokens"


CHAIN = Chain("lines", "text", "part of a line", find_line, {"lines": tell_line, "tokens": tell_tokens})
