"""How `latentmill follow` traces one line through the tables of the toy pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from stages.pipelines import Chain, Query, Row


def find_line(query: Query, need: Callable[[str], Any], text: str) -> list[dict[str, Any]]:
    return query("select * from lines where contains(text, $text) order by line_id", text=text)


def describe_line(query: Query, line: Row) -> Iterator[str]:
    yield f"{line['path']}:{line['number']}: {line['text']}"


def describe_tokens(query: Query, line: Row) -> Iterator[str]:
    for row in query("select * from tokens where line_id = $id", id=line["line_id"]):
        yield f"{row['ids_shape'][0]} tokens"


def describe_train(query: Query, line: Row) -> Iterator[str]:
    for row in query("select count(*) as draws, avg(loss) as loss from train where line_id = $id", id=line["line_id"]):
        yield f"drawn {row['draws']} times, mean loss {row['loss']:.3f}"


CHAIN = Chain(
    table="lines",
    label="text",
    text="part of a line",
    find=find_line,
    describe={"lines": describe_line, "tokens": describe_tokens, "train": describe_train},
)
