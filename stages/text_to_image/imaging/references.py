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
    """Find the reference images among the files `paths`, by their names alone. A reference is a picture that an edit
    starts from. The result maps each reference's path to (image, number). `image` is the path of the picture after the
    edit. It is None if no image has a matching name. `number` counts the references of one image from 1. `paths` are
    relative to the image folder.

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
    """Return where a file lies in a folder of references, as (folders above, name, path below). `name` is the name of
    the folder of references. The path below has no suffix. Folders and paths are tuples of names. The result is None if
    the file is in no such folder. `names` are the names of folders of references. A name may be a path, such as
    "pairs/before".
    """
    parts = _parts(path)
    for at in range(len(parts) - 1):
        for name in names:
            inner = PurePosixPath(name).parts
            if inner and parts[at : at + len(inner)] == inner and at + len(inner) < len(parts):
                return parts[:at], name, parts[at + len(inner) :]
    return None


def _places(images: Sequence[str]) -> dict[tuple[Parts, Parts], str]:
    """Return a dict that finds images from the place of a reference. A key is (folders above, path below), without
    suffix. The value is the path of an image. The image train/a/cat.png has the key ("train", "a/cat"), among others.
    It also has the key ("", "a/cat"): the folder of references may lie beside train. Both parts of a key are tuples of
    names, written here as text.
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
    """Find references by the endings of names: a/cat_in.png is the reference of a/cat_out.png. Return a dict from the
    path of the reference to the path of its image. `images` are the paths to search.
    """
    of_name = {_parts(path): path for path in reversed(images)}
    found: dict[str, str | None] = {}
    for path in images:
        *above, stem = _parts(path)
        for ending, other in ENDINGS.items():
            if stem.endswith(ending) and (image := of_name.get((*above, stem.removesuffix(ending) + other))):
                found[path] = image
    return found


def without_ending(path: str) -> list[str]:
    """Return where a caption of a pair of images may lie, as a list of at most one path. A pair is an image and its
    reference. For the image a/cat_out.png, the list is ["a/cat.png"]. It is empty if the image's name has no ending
    such as _out.
    """
    image = PurePosixPath(path)
    shared = [image.stem.removesuffix(ending) for ending in ENDINGS.values() if image.stem.endswith(ending)]
    return [str(image.with_name(stem + image.suffix)) for stem in shared if stem]


def _numbered(found: Mapping[str, str | None], places: Mapping[str, int]) -> dict[str, Pair]:
    """Return a dict from each reference's path to (path of its image, number). The references of an image are numbered
    from 1. `found` maps a reference to its image. `places` maps a reference to the position of its folder among the
    folders of references. Lower positions get lower numbers. References without a position come first.
    """
    counts: dict[str | None, int] = {}
    numbers: dict[str, Pair] = {}
    for path in sorted(found, key=lambda path: (places.get(path, -1), path)):
        counts[found[path]] = counts.get(found[path], 0) + 1
        numbers[path] = (found[path], counts[found[path]])
    return numbers


def _parts(path: str) -> Parts:
    return PurePosixPath(composed(path)).with_suffix("").parts
