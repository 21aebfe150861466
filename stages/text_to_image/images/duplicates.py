"""Decide which of several files with the same bytes is used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


def mark_duplicates(rows: Iterable[Row]) -> list[Row]:
    """Return all rows of the table images, in the order given, with `rejected` set to "duplicate" where it applies.

    Of the files with equal bytes (equal `image_id`), the one whose path sorts first is used; the others are duplicates of
    it. A row that was a duplicate and is first now becomes usable. Rows rejected for another reason stay as they are.
    """
    rows = list(rows)
    first: dict[str, str] = {}
    for row in filter(_decodes, rows):
        first[row["image_id"]] = min(row["path"], first.get(row["image_id"], row["path"]))
    return [_marked(row, first[row["image_id"]]) if _decodes(row) else row for row in rows]


def _decodes(row: Row) -> bool:
    return row["rejected"] in (None, "duplicate")


def _marked(row: Row, first: str) -> Row:
    if row["path"] == first:
        return row | {"rejected": None, "detail": ""}
    return row | {"rejected": "duplicate", "detail": f"the same bytes as {first}"}
