"""References: the pictures that an edit starts from. An image and its references are a pair, which edit training learns from.

The references of train/cat.png are control/cat.png, train/control/cat.png, and so on in control_1, control_2 and control_3.
In one folder, cat_in.png is the reference of cat_out.png, and cat_start.png that of cat_end.png.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from stages.text_to_image.imaging.masks import composed

USE = "reference"  # in the column `use` of the table `images`
FOLDERS = ("control", "control_1", "control_2", "control_3", "reference", "references")
ENDINGS = {"_in": "_out", "_start": "_end"}  # of the name of a reference, and of the name of its image

Parts = tuple[str, ...]
Pair = tuple[str | None, int]  # path of the image that a reference belongs to, and the number of the reference


def pair_references(paths: Iterable[str], folders: Sequence[str] | None) -> dict[str, Pair]:
    """Return which of the files `paths` are references, and of which images. The result maps the path of a reference to a pair
    (path of its image, number of the reference from 1). The path is None if no image has the reference's name. `paths` are
    relative to the image folder. No file is opened.

    `folders` are the names of the folders that hold references, in the order in which references are numbered. If it is None,
    `FOLDERS` and the endings of names in `ENDINGS` are used. Such a folder then counts only if one of its files has the name of
    an image.
    """
    paths = sorted(paths)
    names = FOLDERS if folders is None else tuple(folders)
    inside = {path: place for path in paths if (place := _folder_of(path, names))}
    images = [path for path in paths if path not in inside]
    places = _places(images)
    found = {path: places.get((above, rest)) for path, (above, _, rest) in inside.items()}
    if folders is None:
        real = {inside[path][:2] for path, image in found.items() if image}
        found = {path: image for path, image in found.items() if inside[path][:2] in real} | _by_ending(images)
    return _numbered(found, {path: names.index(name) for path, (_, name, _) in inside.items()})


def _folder_of(path: str, names: Sequence[str]) -> tuple[Parts, str, Parts] | None:
    """Return the place of a file in a folder of references: (folders above it, its name, path below it without suffix). Return
    None if the file is in no such folder. `names` are the names of such folders. A name may be a path, such as "pairs/before".
    """
    parts = _parts(path)
    for at in range(len(parts) - 1):
        for name in names:
            inner = PurePosixPath(name).parts
            if inner and parts[at : at + len(inner)] == inner and at + len(inner) < len(parts):
                return parts[:at], name, parts[at + len(inner) :]
    return None


def _places(images: Sequence[str]) -> dict[tuple[Parts, Parts], str]:
    """Return the places that an image is found at: (folders above, path below without suffix) -> path of the image. An image
    train/a/cat.png is found at ("train", "a/cat"), and also at ("", "a/cat"), where the folder train is left out. The folder
    of references then lies beside train.
    """
    found: dict[tuple[Parts, Parts], str] = {}
    for path in reversed(images):
        parts = _parts(path)
        found |= {(parts[:at], parts[at + 1 :]): path for at in range(len(parts) - 1)}
    for path in reversed(images):
        parts = _parts(path)
        found |= {(parts[:at], parts[at:]): path for at in range(len(parts))}
    return found


def _by_ending(images: Sequence[str]) -> dict[str, str | None]:
    """Return the references among `images` whose names end as in `ENDINGS`: path -> path of the image."""
    of_name = {_parts(path): path for path in reversed(images)}
    found: dict[str, str | None] = {}
    for path in images:
        *above, stem = _parts(path)
        for ending, other in ENDINGS.items():
            if stem.endswith(ending) and (image := of_name.get((*above, stem.removesuffix(ending) + other))):
                found[path] = image
    return found


def without_ending(path: str) -> list[str]:
    """Return the path at which a caption of the pair may lie: a/cat.png for a/cat_out.png. The list is empty for the path of an
    image whose name has no such ending.
    """
    image = PurePosixPath(path)
    shared = [image.stem.removesuffix(ending) for ending in ENDINGS.values() if image.stem.endswith(ending)]
    return [str(image.with_name(stem + image.suffix)) for stem in shared if stem]


def _numbered(found: Mapping[str, str | None], places: Mapping[str, int]) -> dict[str, Pair]:
    """Return the pair (path of the image, number) of each reference. `found` maps references to images. The references of an
    image are numbered from 1, in the order of `places`.
    """
    counts: dict[str | None, int] = {}
    numbers: dict[str, Pair] = {}
    for path in sorted(found, key=lambda path: (places.get(path, -1), path)):
        counts[found[path]] = counts.get(found[path], 0) + 1
        numbers[path] = (found[path], counts[found[path]])
    return numbers


def _parts(path: str) -> Parts:
    return PurePosixPath(composed(path)).with_suffix("").parts
