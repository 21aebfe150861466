"""Find the captions of an image: in a sidecar file, in a metadata file, or in the image's file name."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from stages.text_to_image.captions.config import CaptionsConfig
from stages.text_to_image.captions.metadata import read_metadata
from stages.text_to_image.captions.text import Caption, normalise, read_text

SIDECAR_BYTES = 1_000_000  # largest sidecar that is read; a caption has some hundred bytes

Lookup = Callable[[str], list[Caption]]  # an image's path, relative to the image folder -> its captions, none if there are none


def make_lookups(folder: Path, paths: list[str], config: CaptionsConfig) -> tuple[list[Lookup], list[str]]:
    """Return (lookups, notes). A lookup is a function from an image's path to the list of the image's captions. There
    is one lookup per entry of `config.sources`. The notes are texts for the user. `folder` is the image folder. `paths`
    are the paths of all images in it, relative to it. Raises ValueError if a metadata file is malformed.

    If the template has no {caption}, no file is read: the only function returns one empty caption for every image.
    """
    if "{caption}" not in config.template:
        return [lambda path: [Caption("", "template", "captions.template")]], []
    notes: list[str] = []
    made: list[Lookup] = []
    for source in config.sources:
        if source == "metadata":
            captions, notes = read_metadata(folder, paths)
            made.append(_from_metadata(captions))
        else:
            made.append(from_file_name if source == "filename" else _sidecars(folder, paths, config))
    return made, notes


def _from_metadata(captions: dict[str, list[Caption]]) -> Lookup:
    return lambda path: captions.get(normalise(path), [])


def from_file_name(path: str) -> list[Caption]:
    """Make a caption from an image's file name, and return it in a list. For example, "a/red_fox-2.png" gives "red fox
    2". If the name has only separators, the list is empty. `path` is relative to the image folder.
    """
    text = " ".join(re.split(r"[\s_-]+", PurePosixPath(path).stem)).strip()
    return [Caption(text, "filename", path)] if text else []


def _sidecars(folder: Path, paths: list[str], config: CaptionsConfig) -> Lookup:
    """Return a function that reads the captions of an image from its sidecar (a text file beside it). The function
    takes the image's path relative to `folder`, and returns a list of captions. For "a.png", it reads "a.png.txt". If
    this file is missing or blank, it reads "a.txt". `config.extension` is used instead of ".txt". `folder` is the image
    folder. `paths` are the relative paths of all images. A sidecar that is created after this call is not found,
    because the folders are listed only once.
    """
    parents = {posixpath.dirname(path) for path in paths}
    existing = {normalise(name): name for parent in parents for name in _file_names(folder, parent)}

    def lookup(path: str) -> list[Caption]:
        for candidate in (path + config.extension, str(PurePosixPath(path).with_suffix(config.extension))):
            name = existing.get(normalise(candidate))
            if name and (captions := _read_sidecar(folder, name, config.lines == "many")):
                return captions
        return []

    return lookup


def _read_sidecar(folder: Path, name: str, many: bool) -> list[Caption]:
    """Return the captions in the sidecar file `name`, a path relative to `folder`. If `many` is True, every line that is
    not blank is a caption. Otherwise the whole text is one caption. A blank file gives an empty list.
    """
    text = read_text(folder / name, SIDECAR_BYTES)
    if many:
        lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
        return [Caption(line, "sidecar", f"{name}:{number}") for number, line in lines if line]
    return [Caption(text.strip(), "sidecar", name)] if text.strip() else []


def _file_names(folder: Path, parent: str) -> list[str]:
    try:
        return [posixpath.join(parent, path.name) for path in (folder / parent).iterdir()]
    except OSError:
        return []
