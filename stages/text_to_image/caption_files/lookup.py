"""Find the captions of an image: in a sidecar file, in a metadata file, or in the image's file name."""

from __future__ import annotations

import functools
import os
import posixpath
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stages.text_to_image.caption_files.metadata import read_metadata
from stages.text_to_image.caption_files.text import Caption, normalise, read_text
from stages.text_to_image.imaging import packed

CAPTIONS = "captions"  # a folder of sidecars
PICTURES = frozenset({"images", "image", "imgs", "img"})  # folders that a folder of captions may lie beside
SIDECAR_BYTES = 1_000_000  # largest sidecar that is read; a caption has some hundred bytes


@dataclass(frozen=True)
class CaptionSources:
    """The places where captions of images are looked for. `sources` has some of "sidecar", "metadata" and "filename",
    the preferred one first. A sidecar is a caption file for one image, such as "a.txt" for "a.png". `extension` is the
    suffix of sidecars, or a tuple of several. `folder` is a separate folder of sidecars, or "". `caption_column` is the
    metadata column with the captions, or "" for the usual ones. With `lines` "many", each line of a sidecar is a
    caption; with "one", its whole text.
    """

    sources: tuple[str, ...]
    extension: str | tuple[str, ...]
    folder: str = ""
    caption_column: str = ""
    lines: str = "one"

    @property
    def extensions(self) -> tuple[str, ...]:
        """The suffixes of sidecar files, the preferred one first."""
        return (self.extension,) if isinstance(self.extension, str) else self.extension


Lookup = Callable[[str], list[Caption]]  # an image's path, relative to the image folder -> its captions, none if there are none


def make_lookups(folder: Path, paths: list[str], config: CaptionSources, project: Path) -> tuple[list[Lookup], list[str]]:
    """Return (lookups, notes). A lookup is a function that takes an image's path and returns the list of its captions.
    The first lookup finds captions inside files of many images, such as tars. Then follows one lookup per entry of
    `config.sources`. `notes` are lines for the user. `folder` is the image folder. `paths` are the paths of all images,
    relative to it. `config` says where captions are looked for. A relative path in `config.folder` starts at `project`,
    the project's folder.

    Raises ValueError if a metadata file is malformed, or if `config.folder` does not exist.
    """
    notes: list[str] = []
    made: list[Lookup] = [_inside(folder, config.caption_column)]
    for source in config.sources:
        if source == "metadata":
            captions, notes = read_metadata(folder, paths, config.caption_column)
            made.append(_from_metadata(captions))
        else:
            made.append(from_file_name if source == "filename" else _sidecars(folder, config, project))
    return made, notes


def _inside(folder: Path, column: str) -> Lookup:
    """Return a function that finds the caption of an image inside a tar, Parquet or Arrow file. The function takes the
    image's path relative to `folder`, the image folder. It returns a list of at most one caption. The list is empty for
    an image that is a file of its own. `column` is the name of the column of captions, or "" for the usual names.
    """

    def lookup(path: str) -> list[Caption]:
        found = packed.split(folder / path) if any(f"{suffix}/" in path.lower() for suffix in packed.SUFFIXES) else None
        if found is None:
            return []
        file, name = found
        text, place = packed.texts(file, column).get(name, ("", ""))
        origin = f"{path.removesuffix(name).rstrip('/')}: {place}"
        return [Caption(text, "metadata" if place.startswith("row ") else "sidecar", origin)] if text else []

    return lookup


def _from_metadata(captions: dict[str, list[Caption]]) -> Lookup:
    return lambda path: captions.get(normalise(path), [])


def from_file_name(path: str) -> list[Caption]:
    """Make a caption from an image's file name, and return it in a list. For example, "a/red_fox-2.png" gives "red fox
    2". If the name has only separators, the list is empty. `path` is relative to the image folder.
    """
    text = " ".join(re.split(r"[\s_-]+", PurePosixPath(path).stem)).strip()
    return [Caption(text, "filename", path)] if text else []


def _sidecars(folder: Path, config: CaptionSources, project: Path) -> Lookup:
    """Return a function that reads the captions of an image from its sidecar: a text file such as "a.png.txt" or
    "a.txt" for "a.png". The function takes the image's path relative to `folder`, the image folder. It returns a list
    of captions, which is empty without a sidecar. A relative path in `config.folder` starts at `project`.

    For each place and each suffix of `config.extensions`, "a.png.txt" comes before "a.txt". The first sidecar that is
    not blank is used. The places are the folder `config.folder` if it is set, otherwise those of `caption_places`. A
    sidecar that is created after this call may not be found, because a folder is listed only once.
    """
    separate = _separate(folder, config.folder, project)

    @functools.cache
    def names(parent: str) -> dict[str, str]:
        return {normalise(name): name for name in _file_names(folder, parent)}

    def lookup(path: str) -> list[Caption]:
        for place in [posixpath.normpath(posixpath.join(separate, path))] if separate else caption_places(path, folder.name):
            for extension in config.extensions:
                for candidate in (place + extension, posixpath.splitext(place)[0] + extension):
                    name = names(posixpath.dirname(candidate)).get(normalise(candidate))
                    if name and (captions := _read_sidecar(folder, name, config.lines == "many")):
                        return captions
        return []

    return lookup


def caption_places(path: str, folder: str) -> list[str]:
    """Return the places where caption files of an image may lie, as a list of paths, the preferred place first. `path`
    is the path of the image. `folder` is the name of the image folder. A place is the path that the image would have
    beside its caption file. For example, the place "captions/cat.png" stands for the caption files
    "captions/cat.png.txt" and "captions/cat.txt". `path` and the places are relative to the image folder.

    The places of "a/images/cat.png" are "a/images/cat.png", "a/images/captions/cat.png", "a/captions/cat.png",
    "a/captions/images/cat.png" and "captions/a/images/cat.png". If `folder` is "images" or another name in `PICTURES`,
    there is one more place: "../captions/a/images/cat.png", in the folder "captions" beside the image folder.
    """
    image = PurePosixPath(path)
    places = [path]
    for above in image.parents:
        below = image.relative_to(above)
        places.append(str(above / CAPTIONS / below))
        if above.name.lower() in PICTURES:
            places.append(str(above.parent / CAPTIONS / below))
    return [*places, f"../{CAPTIONS}/{path}"] if folder.lower() in PICTURES else places


def caption_file(path: str, paths: list[str], folder: Path, config: CaptionSources, project: Path) -> str:
    """Return the path of a new caption file for the image `path`: "a.txt" for "a.png", or "a.png.txt" if another image
    has the same name without its extension, such as "a.jpg". `paths` are all images. All paths are relative to the
    image folder `folder`. If `config.folder` names a separate folder for captions, the file lies there; a relative name
    is relative to the folder `project`. The result is "" if `config.sources` lacks "sidecar", or if the image lies in
    an archive.
    """
    if "sidecar" not in config.sources or packed.split(folder / path):
        return ""
    stem = posixpath.splitext(path)[0]
    shared = sum(posixpath.splitext(other)[0] == stem for other in paths) > 1
    name = (path if shared else stem) + config.extensions[0]
    separate = _separate(folder, config.folder, project)
    return posixpath.normpath(posixpath.join(separate, name)) if separate else name


def _separate(folder: Path, setting: str, project: Path) -> str:
    """Return the user's folder of caption files as a path relative to `folder`, the image folder. `setting` is the
    value of `captions.folder`: a path, absolute or relative to `project`. If `setting` is "", the result is "". Raises
    ValueError if the folder of caption files does not exist.
    """
    if not setting:
        return ""
    home = Path(setting)
    with suppress(RuntimeError):
        home = home.expanduser()
    if not (project / home).is_dir():
        raise ValueError(
            f"captions.folder must be a folder of caption files, got {setting!r}: there is no folder {project / home}"
        )
    return Path(os.path.relpath((project / home).resolve(), folder.resolve())).as_posix()


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
