"""List the files of a root, without those that .gitignore files or the setting `sources.exclude` leave out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from stages.retrieval.sources.roots import Root

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

Row = dict[str, Any]

FILE_COLUMNS = ("path", "root", "file", "module", "bytes", "mtime_ns", "inode")  # by these values an unchanged file is recognised
CONTAINERS = ("src", "lib", "python")  # folders of a repository in which packages lie
RULES = ".gitignore"
CACHES = ("__pycache__/", "*.pyc", "*.pyo", "*.egg-info/", "*.dist-info/")  # never sources, whatever the rules say


def scan(root: Root, exclude: Iterable[str] = ()) -> list[Row]:
    """FILE_COLUMNS of every file, by path; only .gitignore files are opened. Hidden files are left out, links to folders are
    followed.

    Raises ValueError if a folder cannot be read, or a pattern is wrong.
    """
    if root.path.is_file():
        return [_row(root, root.path.name, root.path.stat())]
    fixed = _spec([*CACHES, *root.exclude, *exclude], "sources.exclude")
    layers = _layers_above(root.path) if root.own_rules else []
    rows = [_row(root, name, status) for name, status in _walk(root, "", fixed, layers, set())]
    return sorted(rows, key=lambda row: str(row["path"]))


Layer = tuple[str, "GitIgnoreSpec"]  # the folder of a .gitignore file as a prefix of names, and its rules


def _walk(
    root: Root, folder: str, fixed: GitIgnoreSpec, layers: list[Layer], seen: set[tuple[int, int]]
) -> Iterator[tuple[str, os.stat_result]]:
    """(path relative to the root, status). `folder` is relative to the root, "" or with a final slash."""
    place = root.path / folder
    try:
        status = place.stat()
        entries = sorted(os.scandir(place), key=lambda entry: entry.name)
    except OSError as error:
        raise ValueError(
            f"source folder {place} cannot be read ({error.strerror}): change its permissions, or exclude it"
        ) from None
    # Loops of links end.
    if (status.st_dev, status.st_ino) in seen:
        return
    seen.add((status.st_dev, status.st_ino))
    if root.own_rules and (place / RULES).is_file():
        layers = [*layers, (folder, _read_rules(place / RULES))]
    for entry in entries:
        is_folder = entry.is_dir()
        name = f"{folder}{entry.name}{'/' if is_folder else ''}"
        if entry.name.startswith(".") or fixed.match_file(name) or _ignored(name, layers):
            continue
        if is_folder:
            yield from _walk(root, name, fixed, layers, seen)
        elif entry.is_file() or entry.is_symlink():
            yield name, entry.stat(follow_symlinks=entry.is_file())


def _ignored(name: str, layers: list[Layer]) -> bool:
    # The innermost file with a pattern that matches decides.
    for prefix, rules in reversed(layers):
        found = rules.check_file(_below(name, prefix)).include
        if found is not None:
            return bool(found)
    return False


def _below(name: str, prefix: str) -> str:
    """The path relative to the folder of a .gitignore file: `name` of "a/b.py" is "b.py" for prefix "a/".

    Prefix "../src/" is of a file above the root src: "a/b.py" is "src/a/b.py" there.
    """
    return f"{prefix.removeprefix('../')}{name}" if prefix.startswith("../") else name.removeprefix(prefix)


def _layers_above(folder: Path) -> list[Layer]:
    """Rules of the .gitignore files above `folder` within its repository, outermost first, with prefixes such as "../a/b/"."""
    folder = folder.resolve()
    above = [folder, *folder.parents]
    top = next((place for place in above if (place / ".git").exists()), None)
    if top is None or top == folder:
        return []
    places = above[1 : above.index(top) + 1][::-1]
    layers = [
        (f"../{PurePosixPath(folder.relative_to(place))}/", _read_rules(place / RULES))
        for place in places
        if (place / RULES).is_file()
    ]
    # The user named this folder: that counts more than a rule that ignores it.
    return [] if _ignored("", layers) else layers


def _read_rules(file: Path) -> GitIgnoreSpec:
    return _spec(file.read_text(encoding="utf-8", errors="replace").splitlines(), str(file))


def _spec(lines: Iterable[str], where: str) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec

    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise ValueError(f"{where} must hold patterns of .gitignore: {error}") from None


def _row(root: Root, name: str, status: os.stat_result) -> Row:
    # A table cannot hold a name that is not UTF-8. The row gets the escaped name, under which no file will be found.
    name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    file = root.given if root.path.is_file() else str(PurePosixPath(root.given, name))
    inode = status.st_ino & (2**63 - 1)  # as int64
    return {
        "path": f"{root.name}/{name}",
        "root": root.name,
        "file": file,
        "module": module_of(root, name),
        "bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "inode": inode,
    }


def module_of(root: Root, name: str) -> str:
    """Dotted, without leading folders src, lib and python; below a package root with the root's name."""
    parts = list(PurePosixPath(name).with_suffix("").parts)
    while len(parts) > 1 and parts[0] in CONTAINERS:
        parts = parts[1:]
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join([root.name, *parts] if root.is_package or not parts else parts)
