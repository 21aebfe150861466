"""Which rows of the table `images` are used, under which paths, and which of them are references."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from stages.text_to_image.imaging.masks import composed

USE = "reference"  # in the column `use` of the table `images`
FOLDERS = ("control", "control_1", "control_2", "control_3", "reference", "references")
ENDINGS = {"_in": "_out", "_start": "_end"}  # of the name of a reference, and of the name of its image

Parts = tuple[str, ...]
Pair = tuple[str | None, int]  # path of the image that a reference belongs to, and the number of the reference


def pair_references(paths: Iterable[str], folders: Sequence[str] | None) -> dict[str, Pair]:
    """Path of each reference -> its image (None if no name matches) and number from 1. `folders` None: FOLDERS, ENDINGS."""
    paths = sorted(paths)
    names = FOLDERS if folders is None else tuple(folders)
    inside = {path: place for path in paths if (place := _folder_of(path, names))}
    images = [path for path in paths if path not in inside]
    places = _places(images)
    found = {path: places.get((above, rest)) for path, (above, _, rest) in inside.items()}
    if folders is None:
        # An ordinary folder may be called control: it counts only if one of its files has the name of an image.
        real = {inside[path][:2] for path, image in found.items() if image}
        found = {path: image for path, image in found.items() if inside[path][:2] in real} | _by_ending(images)
    return _numbered(found, {path: names.index(name) for path, (_, name, _) in inside.items()})


def _folder_of(path: str, names: Sequence[str]) -> tuple[Parts, str, Parts] | None:
    """train/control/a/cat.png gives (("train",), "control", ("a", "cat")); None outside the folders `names`."""
    parts = _parts(path)
    for at in range(len(parts) - 1):
        for name in names:
            inner = PurePosixPath(name).parts
            if inner and parts[at : at + len(inner)] == inner and at + len(inner) < len(parts):
                return parts[:at], name, parts[at + len(inner) :]
    return None


def _places(images: Sequence[str]) -> dict[tuple[Parts, Parts], str]:
    """(folders above the folder of references, path below it) -> image. `images` has no files of such folders.

    (("train",), ("a", "cat")) is where the references of train/a/cat.png and train/target/a/cat.png are looked for.
    """
    found: dict[tuple[Parts, Parts], str] = {}
    # Images in a folder beside the references, such as train/target; written first, so that the plain places below replace
    # them.
    for path in reversed(images):
        parts = _parts(path)
        found |= {(parts[:at], parts[at + 1 :]): path for at in range(len(parts) - 1)}
    for path in reversed(images):
        parts = _parts(path)
        found |= {(parts[:at], parts[at:]): path for at in range(len(parts))}
    return found


def _by_ending(images: Sequence[str]) -> dict[str, str | None]:
    """Reference -> image, by ENDINGS."""
    of_name = {_parts(path): path for path in reversed(images)}
    found: dict[str, str | None] = {}
    for path in images:
        *above, stem = _parts(path)
        for ending, other in ENDINGS.items():
            if stem.endswith(ending) and (image := of_name.get((*above, stem.removesuffix(ending) + other))):
                found[path] = image
    return found


def without_ending(path: str) -> list[str]:
    """Without "_out" or "_end": "a/cat_out.png" gives ["a/cat.png"], whose caption file may be that of the pair."""
    image = PurePosixPath(path)
    shared = [image.stem.removesuffix(ending) for ending in ENDINGS.values() if image.stem.endswith(ending)]
    return [str(image.with_name(stem + image.suffix)) for stem in shared if stem]


def _numbered(found: Mapping[str, str | None], places: Mapping[str, int]) -> dict[str, Pair]:
    """Number the references of each image from 1: by ending first, then by the rank of their folder, then by path."""
    counts: dict[str | None, int] = {}
    numbers: dict[str, Pair] = {}
    for path in sorted(found, key=lambda path: (places.get(path, -1), path)):
        counts[found[path]] = counts.get(found[path], 0) + 1
        numbers[path] = (found[path], counts[found[path]])
    return numbers


def _parts(path: str) -> Parts:
    return PurePosixPath(composed(path)).with_suffix("").parts


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


def first_names(names: Sequence[str], count: int = 3) -> str:
    """Such as "a, b, c and 4 more"."""
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
