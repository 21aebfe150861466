"""List the image folder: which files become rows, and which are captions, licences, masks or the project's own files."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from stages.text_to_image.imaging import masks, packed
from stages.text_to_image.imaging.decode import IMAGE_SUFFIXES

Row = dict[str, Any]

FILE_COLUMNS = ("path", "bytes", "mtime_ns", "inode", "offset")  # by these values an unchanged file is recognised

# Files that lie beside images and describe them: they become no rows.
# fmt: off
SIDE_SUFFIXES = frozenset({
    ".aae", ".caption", ".captions", ".csv", ".ini", ".json", ".jsonl", ".lock", ".log", ".md", ".parquet", ".py", ".rst",
    ".tags", ".toml", ".tsv", ".txt", ".xml", ".xmp", ".yaml", ".yml",
})
SIDE_NAMES = frozenset({"authors", "copying", "credits", "license", "licence", "makefile", "notice", "readme", "thumbs.db"})
# fmt: on
SYSTEM = ("/proc", "/sys")  # files there have no size and no end
PROJECT_FILE = "project.toml"  # a folder that holds this file is a project, and these folders in it are its output
PROJECT_FOLDERS = frozenset({"tables", "weights", "exports"})


@dataclass(frozen=True)
class Listing:
    """The content of an image folder."""

    files: list[Row]  # with FILE_COLUMNS, sorted by path
    masks: int  # files that are masks of others, and not in `files`


def scan(folder: Path, below: Sequence[str] = ("",)) -> Listing:
    """List the image files without opening them, in the subfolders `below` and all folders in these. Links to folders are
    followed.

    Raises ValueError if `folder` is no folder, or one of the folders cannot be read.
    """
    if not folder.is_dir():
        raise ValueError(_no_folder(folder))
    entries = (entry for each in below for entry in _files_below(folder / each))
    rows = [row for entry in entries for row in _rows_of(folder, entry)]
    of_others = masks.which_are_masks(row["path"] for row in rows)
    files = [row for row in rows if row["path"] not in of_others]
    return Listing(sorted(files, key=lambda row: str(row["path"])), len(of_others))


def _rows_of(folder: Path, entry: os.DirEntry[str]) -> list[Row]:
    """One row per image: several for a tar, Parquet or Arrow file, none for a caption file or a licence."""
    name = Path(entry.name)
    if name.suffix.lower() not in packed.SUFFIXES:
        # Anything else becomes a row, whatever is in it.
        return [] if _describes_others(name) else [_file_row(folder, entry)]
    whole = _file_row(folder, entry)
    return [
        whole | {"path": f"{whole['path']}/{inner}", "bytes": member.size, "offset": member.offset}
        for inner, member in packed.members(Path(entry.path)).items()
        if PurePosixPath(inner).suffix.lower() in IMAGE_SUFFIXES and not PurePosixPath(inner).name.startswith(".")
    ]


def _no_folder(folder: Path) -> str:
    problem = "is a file, not a folder" if folder.exists() else "does not exist"
    if folder.is_file() and folder.suffix == ".json":
        return (
            f"images.folder must be a folder, got the file {folder}: OneTrainer's concepts are read by latentmill init --images"
        )
    try:
        others = [path.name for path in folder.parent.iterdir() if path.is_dir()]
    except OSError:
        others = []
    near = difflib.get_close_matches(folder.name, others, 1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    return f"image folder {folder} {problem}: put the images there, or set images.folder{hint}"


def _files_below(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Raises ValueError if a folder cannot be read, or is one of the system's."""
    seen: set[tuple[int, int]] = set()
    waiting: list[Iterator[os.DirEntry[str]]] = [iter(_entries(folder, seen))]
    while waiting:  # without recursion: folders may be nested a thousand deep
        entry = next(waiting[-1], None)
        if entry is None:
            waiting.pop()
        elif entry.is_symlink() and not Path(entry.path).exists():
            yield entry  # a broken link becomes a row too, so that the user hears of it
        elif entry.is_dir():
            waiting.append(iter(_entries(Path(entry.path), seen)))
        elif entry.is_file():
            yield entry


def _entries(folder: Path, seen: set[tuple[int, int]]) -> list[os.DirEntry[str]]:
    try:
        status = folder.stat()
        # Loops of links end.
        if (status.st_dev, status.st_ino) in seen:
            return []
        # Only the start or a link can lead there.
        if (folder.is_symlink() or not seen) and any(folder.resolve().is_relative_to(each) for each in SYSTEM):
            raise ValueError(f"folder {folder} leads to {folder.resolve()}, a folder of the system, which holds no images")
        seen.add((status.st_dev, status.st_ino))
        return _visible(sorted(os.scandir(folder), key=lambda entry: entry.name))
    except OSError as error:
        remedy = "change its permissions, or move it out of the image folder"
        raise ValueError(f"folder {folder} cannot be read ({error.strerror}): {remedy}") from error


def _visible(entries: list[os.DirEntry[str]]) -> list[os.DirEntry[str]]:
    """Without hidden entries, and in a project's folder without what the project writes."""
    is_project = any(entry.name == PROJECT_FILE for entry in entries)
    written = PROJECT_FOLDERS if is_project else frozenset()
    return [entry for entry in entries if not entry.name.startswith((".", "__MACOSX")) and entry.name not in written]


def _file_row(folder: Path, entry: os.DirEntry[str]) -> Row:
    try:
        status = entry.stat()
    except OSError:
        status = entry.stat(follow_symlinks=False)
    path = Path(entry.path).relative_to(folder).as_posix()
    # A table cannot hold a name that is not UTF-8. The row gets the escaped name, under which no file will be found.
    path = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    inode = status.st_ino & (2**63 - 1)  # as int64
    mtime_ns = max(-(2**63), min(2**63 - 1, status.st_mtime_ns))  # after the year 2262, an int64 has no room for it
    return {"path": path, "bytes": status.st_size, "mtime_ns": mtime_ns, "inode": inode, "offset": None}


def _describes_others(name: Path) -> bool:
    return name.suffix.lower() in SIDE_SUFFIXES or name.name.lower() in SIDE_NAMES
