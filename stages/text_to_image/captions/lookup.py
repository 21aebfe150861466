"""Find the captions of an image: in a sidecar file, in a metadata file, or in the image's file name."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from stages.text_to_image.captions.config import CaptionsConfig
from stages.text_to_image.captions.metadata import read_metadata
from stages.text_to_image.captions.text import Caption, normalise, read_text

Lookup = Callable[[str], list[Caption]]  # an image's path, relative to the image folder -> its captions, none if there are none


def lookups(folder: Path, paths: list[str], config: CaptionsConfig) -> tuple[list[Lookup], list[str]]:
    """Return the functions that find an image's captions, one per setting in `config.sources`, and notes for the user. Each
    function takes a path of an image relative to the image folder `folder`, and returns its captions, an empty list if it
    finds none. `paths` are the relative paths of all images. ValueError for a metadata file that is malformed.

    If the template has no {caption}, no file is read: one function returns an empty caption for every image.
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
    """Make a caption of an image's file name: "a/red_fox-2.png" gives "red fox 2"."""
    text = " ".join(re.split(r"[\s_-]+", PurePosixPath(path).stem)).strip()
    return [Caption(text, "filename", path)] if text else []


def _sidecars(folder: Path, paths: list[str], config: CaptionsConfig) -> Lookup:
    """Return a lookup that reads the captions of the image a.png from a.png.txt or else from a.txt. `paths` are all images,
    relative to `folder`; their folders are listed once, now.
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
    """Return the captions in the sidecar file `folder / name`: one per line that is not empty if `many` is True, else the
    whole text as one caption; none if the file is blank.
    """
    text = read_text(folder / name)
    if many:
        lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
        return [Caption(line, "sidecar", f"{name}:{number}") for number, line in lines if line]
    return [Caption(text.strip(), "sidecar", name)] if text.strip() else []


def _file_names(folder: Path, parent: str) -> list[str]:
    try:
        return [posixpath.join(parent, path.name) for path in (folder / parent).iterdir()]
    except OSError:
        return []
