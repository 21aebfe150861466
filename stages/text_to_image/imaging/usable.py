"""Which rows of the table `images` can be used, and under which paths."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa

from stages.text_to_image.imaging.references import USE


def usable_rows(images: pa.Table, references: bool = False) -> list[dict[str, Any]]:
    """Return the usable rows of the table `images` as dicts, sorted by path. A row is usable if it is not rejected.
    `images` needs the columns `path` and `rejected`. If `references` is False, the reference images of edit training
    are left out. Raises ValueError if no image is usable. The message counts the rejected images by the reason for
    rejection.
    """
    rows = [row for row in images.to_pylist() if references or row.get("use") != USE]
    usable = [row for row in rows if row["rejected"] is None]
    if not usable:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(Counter(row["rejected"] for row in rows).items()))
        raise ValueError(f"none of the {len(rows)} images can be used: {reasons}")
    return sorted(usable, key=lambda row: str(row["path"]))


def usable_paths(images: pa.Table, references: bool = False) -> dict[str, list[str]]:
    """Return a dict from the image_id of each usable image to the paths of its files. A value is a list: the path of
    the file that is used, then the paths of its duplicates, sorted. The images are sorted by the first path. `images`
    is the table `images`, with at least the columns `image_id`, `path` and `rejected`. If `references` is False, the
    reference images of edit training are left out. Raises ValueError if no image is usable.
    """
    paths = {row["image_id"]: [row["path"]] for row in usable_rows(images, references)}
    for row in sorted(images.to_pylist(), key=lambda row: str(row["path"])):
        wanted = references or row.get("use") != USE
        if row["rejected"] == "duplicate" and row["image_id"] in paths and wanted:
            paths[row["image_id"]].append(row["path"])
    return paths
