"""Which rows of the table `images` can be used, and under which paths."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa

from stages.text_to_image.imaging.references import USE


def usable_rows(images: pa.Table, references: bool = False) -> list[dict[str, Any]]:
    """Rows that are not rejected, by path. Raises ValueError if there are none, with the reasons."""
    rows = [row for row in images.to_pylist() if references or row.get("use") != USE]
    usable = [row for row in rows if row["rejected"] is None]
    if not usable:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(Counter(row["rejected"] for row in rows).items()))
        raise ValueError(f"none of the {len(rows)} images can be used: {reasons}")
    return sorted(usable, key=lambda row: str(row["path"]))


def usable_paths(images: pa.Table, references: bool = False) -> dict[str, list[str]]:
    """image_id -> path of the file that is used, then those of its duplicates. Raises ValueError if no image is usable."""
    paths = {row["image_id"]: [row["path"]] for row in usable_rows(images, references)}
    for row in sorted(images.to_pylist(), key=lambda row: str(row["path"])):
        wanted = references or row.get("use") != USE
        if row["rejected"] == "duplicate" and row["image_id"] in paths and wanted:
            paths[row["image_id"]].append(row["path"])
    return paths
