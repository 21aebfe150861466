"""Decide which of several files with the same bytes is used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stages.text_to_image.imaging.usable import USE

Row = dict[str, Any]


def mark_duplicates(rows: Iterable[Row]) -> list[Row]:
    """All rows of `images` in the given order. Of rows with one image_id the first path stays, subject before regularisation."""
    rows = list(rows)
    first: dict[tuple[str, bool], str] = {}
    for row in sorted(filter(_decodes, rows), key=lambda row: (row["use"] or "", row["path"])):
        first.setdefault(_group(row), row["path"])
    return [_marked(row, first[_group(row)]) if _decodes(row) else row for row in rows]


def _group(row: Row) -> tuple[str, bool]:
    # A reference may have the bytes of an image.
    return row["image_id"], row["use"] == USE


def _decodes(row: Row) -> bool:
    return row["rejected"] in (None, "duplicate")


def _marked(row: Row, first: str) -> Row:
    if row["path"] == first:
        return row | {"rejected": None, "detail": ""}
    return row | {"rejected": "duplicate", "detail": f"the same bytes as {first}"}
