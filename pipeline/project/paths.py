"""Paths as a user writes them: from the home folder, from a project, and in a command line."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]  # the repository's folder, where `make` runs


def from_home(path: str | Path) -> Path:
    with suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def common_folder(paths: str | tuple[str, ...], project: Path) -> Path:
    """A single path itself, or the deepest folder that contains several; only then are links resolved."""
    given = [project / from_home(path) for path in ((paths,) if isinstance(paths, str) else paths)]
    return given[0] if len(given) == 1 else Path(os.path.commonpath([path.resolve() for path in given]))


def shell_path(folder: Path) -> str:
    """Quoted, for `make PROJECT=` in the checkout: relative only if that leads to the same folder from there."""
    usable = folder.is_absolute() or (CHECKOUT / folder).resolve() == folder.resolve()
    return shlex.quote(str(folder if usable else folder.resolve()))
