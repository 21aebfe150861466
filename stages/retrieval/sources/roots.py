"""Find the folders that the setting `sources.roots` names: folders, and installed Python packages by name."""

from __future__ import annotations

import difflib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "package:"  # "package:requests" is the installed package requests
STANDARD_LIBRARY = "stdlib"  # "package:stdlib" is the standard library of the running Python
NOT_LIBRARY = ("/site-packages/", "/dist-packages/")  # folders in the standard library's folder that do not belong to it


@dataclass(frozen=True)
class Root:
    """A source folder, or a single source file."""

    name: str  # first part of the paths of its files
    path: Path
    given: str  # the user's entry, or the absolute path of an installed package
    exclude: tuple[str, ...] = ()  # patterns of .gitignore
    own_rules: bool = True  # the .gitignore files in and above it apply

    @property
    def is_package(self) -> bool:
        """The names of its modules begin with `name`: api.py in a package requests is requests.api, in a folder src it is api."""
        return (self.path / "__init__.py").is_file()


def find_roots(given: Iterable[str], project: Path) -> list[Root]:
    """Raises ValueError if a folder or package does not exist, or two roots have one name."""
    roots: dict[str, Root] = {}
    for text in given:
        root = _package(text.removeprefix(PACKAGE)) if text.startswith(PACKAGE) else _folder(text, project)
        if root.name in roots:
            raise ValueError(f"sources.roots must be folders or packages of different names, got {root.name!r} twice")
        roots[root.name] = root
    return list(roots.values())


def _folder(text: str, project: Path) -> Root:
    folder = project / Path(text).expanduser()
    if folder.is_dir():
        return Root(folder.resolve().name, folder, text)
    problem = "is a file, not a folder" if folder.exists() else "does not exist"
    try:
        others = [path.name for path in folder.parent.iterdir() if path.is_dir()]
    except OSError:
        others = []
    near = difflib.get_close_matches(folder.name, others, 1)
    hint = f'; did you mean "{near[0]}"?' if near else f"; an installed package is named {PACKAGE}NAME"
    raise ValueError(f"source folder {folder} {problem}: set sources.roots{hint}")


def _package(name: str) -> Root:
    if name == STANDARD_LIBRARY:
        return _installed(name, sysconfig.get_path("stdlib"), NOT_LIBRARY)
    try:
        spec = find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ValueError(
            f"sources.roots: there is no installed package {name!r}; {PACKAGE}{STANDARD_LIBRARY} is Python's library"
        )
    if spec.submodule_search_locations:
        return _installed(name, next(iter(spec.submodule_search_locations)))
    if not spec.origin or not Path(spec.origin).is_file():
        raise ValueError(f"sources.roots: package {name!r} has no source files")
    return _installed(name, spec.origin)


def _installed(name: str, place: str, exclude: tuple[str, ...] = ()) -> Root:
    return Root(name, Path(place), place, exclude, own_rules=False)
