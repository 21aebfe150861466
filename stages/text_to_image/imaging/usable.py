"""Which rows of the table `images` are used, under which paths, and which of them are references."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

REFERENCE = "reference"  # in the column `use` of the table `images`
# "IMG 1 Kopie 2", "Kopie von IMG", "IMG - Copy (2)", "IMG(1)", as macOS, Windows and browsers name copies
COPY = re.compile(
    r"^(copy of|kopie von|copie de|copia de) |[ _-](copy|kopie|copie|copia)( ?\(?\d+\)?)?$|\S ?\(\d+\)$", re.IGNORECASE
)
ENDINGS = {"_in": "_out", "_start": "_end"}  # of the name of a reference, and of the name of its image


def without_ending(path: str) -> list[str]:
    """Without "_out" or "_end": "a/cat_out.png" gives ["a/cat.png"], whose caption file may be that of the pair."""
    image = PurePosixPath(path)
    shared = [image.stem.removesuffix(ending) for ending in ENDINGS.values() if image.stem.endswith(ending)]
    return [str(image.with_name(stem + image.suffix)) for stem in shared if stem]


def usable_rows(images: pa.Table, references: bool = False) -> list[dict[str, Any]]:
    """Rows that are not rejected, by path. Raises ValueError if all are, with the reasons."""
    rows = [row for row in images.to_pylist() if references or row.get("use") != REFERENCE]
    usable = [row for row in rows if row["rejected"] is None]
    if rows and not usable:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(Counter(row["rejected"] for row in rows).items()))
        raise ValueError(f"none of the {len(rows)} images can be used: {reasons}")
    return sorted(usable, key=lambda row: str(row["path"]))


def usable_paths(images: pa.Table, references: bool = False) -> dict[str, list[str]]:
    """image_id -> path of the file that is used, then those of its duplicates. Raises ValueError if no image is usable."""
    paths = {row["image_id"]: [row["path"]] for row in usable_rows(images, references)}
    for row in sorted(images.to_pylist(), key=lambda row: str(row["path"])):
        wanted = references or row.get("use") != REFERENCE
        if row["rejected"] == "duplicate" and row["image_id"] in paths and wanted:
            paths[row["image_id"]].append(row["path"])
    return paths


def names_copy(path: str) -> bool:
    return COPY.search(PurePosixPath(path).stem) is not None


def first_names(names: Sequence[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
