"""A unit of source code before it is a row."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Unit:
    name: str  # "" of a window, as are `signature` and `docstring`
    qualified_name: str  # with the enclosing classes: Outer.f; of a window: lines 1 to 20
    kind: str  # function, method, class, lines
    first_line: int  # in the file, from 1
    last_line: int
    signature: str  # code before the body: def f(x):
    docstring: str  # other languages than Python: the comment before the unit
    body: str  # without the docstring; of a Python class, methods are only signatures, here and in `rest`
    rest: str  # all code after the name, without the docstring: (x): return x
    code_lines: int  # lines of `body` that hold code


def package_of(path: str) -> str:
    """Root and first folder or module below it: "stdlib/email" of "stdlib/email/parser.py"."""
    root, _, below = path.partition("/")
    return f"{root}/{PurePosixPath(below).parts[0].partition('.')[0]}" if below else root


def windows(text: str, size: int) -> Iterator[Unit]:
    """At most `size` lines, each `size // 2` after the one before. Blank windows are left out."""
    lines = text.splitlines()
    step = max(1, size // 2)
    for start in range(0, max(1, len(lines) - size + step), step):
        part = lines[start : start + size]
        code = [line for line in part if line.strip()]
        if not code:
            continue
        first, last = start + 1, start + len(part)
        body = textwrap.dedent("\n".join(part)).strip("\n")
        yield Unit("", f"lines {first} to {last}", "lines", first, last, "", "", body, f"\n{body}", len(code))
