"""Decide which of several files with the same bytes is used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stages.text_to_image.imaging.references import USE

Row = dict[str, Any]


def mark_duplicates(rows: Iterable[Row]) -> list[Row]:
    """Mark duplicates among rows of the table `images`, and return all rows in the given order. Rows with the same
    `image_id` (sha256 of the file) are duplicates. One of them stays usable. The others get "duplicate" in the column
    `rejected`. Their column `detail` gets the path of the usable file.

    The usable row is the one with the first path in sorted order. Images to train on come before regularisation images.
    References are compared with each other only: a reference may be equal to an image. Rows that are rejected for another
    reason are returned unchanged.
    """
    rows = list(rows)
    first: dict[tuple[str, bool], str] = {}
    for row in sorted(filter(_decodes, rows), key=lambda row: (row["use"] or "", row["path"])):
        first.setdefault(_group(row), row["path"])
    return [_marked(row, first[_group(row)]) if _decodes(row) else row for row in rows]


def _group(row: Row) -> tuple[str, bool]:
    return row["image_id"], row["use"] == USE


def _decodes(row: Row) -> bool:
    return row["rejected"] in (None, "duplicate")


def _marked(row: Row, first: str) -> Row:
    if row["path"] == first:
        return row | {"rejected": None, "detail": ""}
    return row | {"rejected": "duplicate", "detail": f"the same bytes as {first}"}
