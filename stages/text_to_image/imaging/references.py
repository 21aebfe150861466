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
    """Find the reference images among the files `paths`, by their names alone. A reference image is a picture that an
    edit starts from. `paths` are relative to the image folder. `folders` names the folders of reference images; None
    means the usual names. Return a dict from the path of each reference image to (image, number). `image` is the path
    of the picture after the edit, or None if no picture has a matching name. `number` counts the reference images of
    one picture from 1.

    The order of `folders` is the order of the numbers. If `folders` is None, `FOLDERS` and the endings of names in
    `ENDINGS` are used. Such a folder then counts only if one of its files has the name of an image.
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
    """Split the path of a file in a folder of references. For example, train/control/a/cat.png gives (("train",),
    "control", ("a", "cat")). `path` is the path of the file. `names` are the names of folders of references. A name may
    consist of several folders, such as "pairs/before". The result is (folders above, name from `names`, path below
    without suffix). The folders above and the path below are tuples of names. Return None if the file is in none of
    these folders.
    """
    parts = _parts(path)
    for at in range(len(parts) - 1):
        for name in names:
            inner = PurePosixPath(name).parts
            if inner and parts[at : at + len(inner)] == inner and at + len(inner) < len(parts):
                return parts[:at], name, parts[at + len(inner) :]
    return None


def _places(images: Sequence[str]) -> dict[tuple[Parts, Parts], str]:
    """Return a dict with which the caller finds the image of a reference. A reference is a picture that an edit starts
    from, and its image is the picture after the edit. `images` are the paths of all images. Each value of the dict is
    the path of an image. The key is made from the path of a reference: (folders above the folder of references, path
    below this folder without suffix). Both are tuples of names.

    For example, the reference train/control/a/cat.png lies in the folder of references "control". Its key is
    (("train",), ("a", "cat")). The value of this key is "train/a/cat.png".

    An image has several keys. The key ((), ("train", "a", "cat")) also gives train/a/cat.png, for the reference
    control/train/a/cat.png. Images in a folder beside the references have keys too: train/target/a/cat.png has the key
    (("train",), ("a", "cat")). If train/a/cat.png exists, it is the value of this key. `images` must not contain files
    in folders of references.
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
    """Find references by the endings of their names, and return a dict from the path of each reference to the path of
    its image. A reference is a picture that an edit starts from, and its image is the picture after the edit. For
    example, a/cat_in.png is the reference of the image a/cat_out.png. `ENDINGS` lists the endings. `images` are the
    paths to search. A path without a counterpart is left out.

    No value of the dict is None. The type allows None because the caller adds the dict to another one with such values.
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
    """Remove "_out" or "_end" from the end of an image's name, before the suffix. Return the new path in a list. For
    example, "a/cat_out.png" gives ["a/cat.png"]. `path` is the path of the image. If the name has neither of these
    endings, or consists of the ending alone, the list is empty.

    The values of `ENDINGS` are these endings. They mark the picture after an edit. The caption of this picture may lie
    beside the path without the ending, such as in a/cat.txt.
    """
    image = PurePosixPath(path)
    shared = [image.stem.removesuffix(ending) for ending in ENDINGS.values() if image.stem.endswith(ending)]
    return [str(image.with_name(stem + image.suffix)) for stem in shared if stem]


def _numbered(found: Mapping[str, str | None], places: Mapping[str, int]) -> dict[str, Pair]:
    """Number the references of each image, from 1. Return a dict from the path of each reference to (path of its image,
    number). `found` maps the path of each reference to the path of its image, or to None if no image is known. `places`
    maps the path of a reference to the rank of the folder in which the reference lies, such as 0 for "control" and 1
    for "control_1". Among the references of one image, a lower rank gets a lower number.

    For example, control/cat.png and control_1/cat.png are references of cat.png. control/cat.png gets the number 1, and
    control_1/cat.png gets 2. References of equal rank are numbered in the order of their paths.

    A reference that was found by the ending of its name, such as cat_in.png, is not in `places`. Such references get
    the lowest numbers. References with None are numbered together, as if they had one image.
    """
    counts: dict[str | None, int] = {}
    numbers: dict[str, Pair] = {}
    for path in sorted(found, key=lambda path: (places.get(path, -1), path)):
        counts[found[path]] = counts.get(found[path], 0) + 1
        numbers[path] = (found[path], counts[found[path]])
    return numbers


def _parts(path: str) -> Parts:
    return PurePosixPath(composed(path)).with_suffix("").parts
