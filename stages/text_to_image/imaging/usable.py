"""Which rows of the table images can be used, and under which paths."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa


def usable_rows(images: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of the table images that are not rejected, as dicts, sorted by path. `images` needs the columns path and
    rejected. ValueError, with the number of images for each reason, if no image is usable.
    """
    rows = images.to_pylist()
    usable = [row for row in rows if row["rejected"] is None]
    if not usable:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(Counter(row["rejected"] for row in rows).items()))
        raise ValueError(f"none of the {len(rows)} images can be used: {reasons}")
    return sorted(usable, key=lambda row: str(row["path"]))


def usable_paths(images: pa.Table) -> dict[str, list[str]]:
    """Return {image_id: paths} for every usable image of the table images, in order of path. The first path is that of the
    file that is used, the others are those of its duplicates. `images` needs the columns image_id, path and rejected.
    ValueError, with the number of images for each reason, if no image is usable.
    """
    paths = {row["image_id"]: [row["path"]] for row in usable_rows(images)}
    for row in sorted(images.to_pylist(), key=lambda row: str(row["path"])):
        if row["rejected"] == "duplicate" and row["image_id"] in paths:
            paths[row["image_id"]].append(row["path"])
    return paths
