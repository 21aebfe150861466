"""Paths in a command line: the checkout, and a folder as `make PROJECT=` takes it."""

from __future__ import annotations

import shlex
from pathlib import Path

from stages.bundled import CHECKOUT


def shell_path(folder: Path) -> str:
    """Quoted, for `make PROJECT=` in the checkout: relative only if that leads to the same folder from there."""
    usable = folder.is_absolute() or (CHECKOUT / folder).resolve() == folder.resolve()
    return shlex.quote(str(folder if usable else folder.resolve()))
