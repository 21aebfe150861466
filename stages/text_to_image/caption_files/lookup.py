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
    """Where captions of images are looked for."""

    sources: tuple[str, ...]  # of sidecar, metadata, filename; the preferred one first
    extension: str | tuple[str, ...]  # of sidecars
    folder: str = ""  # separate folder of sidecars
    caption_column: str = ""  # of metadata; "": text, caption or prompt
    lines: str = "one"  # many: every line of a sidecar is a caption

    @property
    def extensions(self) -> tuple[str, ...]:
        return (self.extension,) if isinstance(self.extension, str) else self.extension


Lookup = Callable[[str], list[Caption]]  # an image's path, relative to the image folder -> its captions, none if there are none


def make_lookups(folder: Path, paths: list[str], config: CaptionSources, project: Path) -> tuple[list[Lookup], list[str]]:
    """One lookup for images inside other files, then one per source, and notes for the user.

    Raises ValueError if a metadata file is malformed, or the separate folder of sidecars does not exist.
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
    """The words of the file name: "a/red_fox-2.png" gives "red fox 2"."""
    text = " ".join(re.split(r"[\s_-]+", PurePosixPath(path).stem)).strip()
    return [Caption(text, "filename", path)] if text else []


def _sidecars(folder: Path, config: CaptionSources, project: Path) -> Lookup:
    separate = _separate(folder, config.folder, project)

    # A folder is listed once: a sidecar that is created meanwhile may not be found.
    @functools.cache
    def names(parent: str) -> dict[str, str]:
        return {normalise(name): name for name in _file_names(folder, parent)}

    def lookup(path: str) -> list[Caption]:
        for place in [posixpath.normpath(posixpath.join(separate, path))] if separate else caption_places(path, folder.name):
            for extension in config.extensions:
                # a.png.txt before a.txt, since a.jpg may lie beside a.png.
                for candidate in (place + extension, posixpath.splitext(place)[0] + extension):
                    name = names(posixpath.dirname(candidate)).get(normalise(candidate))
                    if name and (captions := _read_sidecar(folder, name, config.lines == "many")):
                        return captions
        return []

    return lookup


def caption_places(path: str, folder: str) -> list[str]:
    """The paths that an image would have beside its caption file, the preferred one first.

    "a/images/cat.png" gives itself, a/images/captions/cat.png, a/captions/cat.png, a/captions/images/cat.png and
    captions/a/images/cat.png. An image folder called images (see PICTURES) adds ../captions/a/images/cat.png.
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
    """The path of a new sidecar, or "" if the sources lack "sidecar" or the image lies in another file."""
    if "sidecar" not in config.sources or packed.split(folder / path):
        return ""
    stem = posixpath.splitext(path)[0]
    # a.txt would also be the caption of a.jpg.
    shared = sum(posixpath.splitext(other)[0] == stem for other in paths) > 1
    name = (path if shared else stem) + config.extensions[0]
    separate = _separate(folder, config.folder, project)
    return posixpath.normpath(posixpath.join(separate, name)) if separate else name


def _separate(folder: Path, setting: str, project: Path) -> str:
    """The setting captions.folder relative to the image folder, or "". Raises ValueError if there is no such folder."""
    if not setting:
        return ""
    home = Path(setting)
    # `expanduser` raises it for an unknown user, such as ~x.
    with suppress(RuntimeError):
        home = home.expanduser()
    if not (project / home).is_dir():
        raise ValueError(
            f"captions.folder must be a folder of caption files, got {setting!r}: there is no folder {project / home}"
        )
    return Path(os.path.relpath((project / home).resolve(), folder.resolve())).as_posix()


def _read_sidecar(folder: Path, name: str, many: bool) -> list[Caption]:
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
