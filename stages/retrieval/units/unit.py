"""A unit of source code before it is a row."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from stages.retrieval.texts import split_lines


@dataclass(frozen=True)
class Unit:
    name: str  # "" of a window, as are `signature` and `docstring`
    # With the enclosing classes: Outer.f; of statements the names they give: A, B; of a section its headings; else lines 1 to 20
    qualified_name: str
    kind: str  # function, method, class, code, section, cell, lines
    first_line: int  # in the file, from 1
    last_line: int
    signature: str  # code before the body: def f(x):
    docstring: str  # other languages than Python: the comment before the unit
    body: str  # without the docstring; of a Python class, methods are only signatures, here and in `rest`
    rest: str  # all code after the name, without the docstring: (x): return x
    code_lines: int  # lines of `body` that hold code

    @property
    def place(self) -> str:
        """What a unit is called that has no name."""
        return f"lines {self.first_line} to {self.last_line}"


def package_of(path: str) -> str:
    """Root and first folder or module below it: "stdlib/email" of "stdlib/email/parser.py"."""
    root, _, below = path.partition("/")
    return f"{root}/{PurePosixPath(below).parts[0].partition('.')[0]}" if below else root


GROUP = 20  # lines up to which statements that follow each other are one unit
GAP = 3  # lines between two statements of a unit, at most
TELLING = 40  # characters of a single line without a name, such as a module's docstring, at least
NAMES = 80  # characters of the names that a unit of statements is called by
Span = tuple[int, int, list[str]]  # first and last line of a statement, and the names that it gives


def code_units(lines: list[str], spans: Iterable[Span], size: int, signs: tuple[str, ...]) -> Iterator[Unit]:
    """Units of the statements outside of functions. One of more than `size` lines is cut into windows. `signs`: what the lines
    of a comment begin with.
    """
    groups: list[tuple[int, int, list[str]]] = []
    for first, last, names in spans:
        if groups and first - groups[-1][1] <= GAP and last - groups[-1][0] < GROUP:
            groups[-1] = (groups[-1][0], last, groups[-1][2] + names)
            continue
        floor = groups[-1][1] if groups else 0
        while first - 2 >= floor and lines[first - 2].strip().startswith(signs):
            first -= 1
        groups.append((first, last, names))
    for first, last, names in groups:
        text = "\n".join(lines[first - 1 : last])
        if last - first >= size:
            yield from windows(text, size, first - 1)
            continue
        body = textwrap.dedent(text).strip("\n")
        code = [line for line in body.splitlines() if line.strip() and not line.strip().startswith(signs)]
        called = ", ".join(names)
        called = called if len(called) <= NAMES else f"{called[:NAMES].rpartition(', ')[0] or called[:NAMES]}, ..."
        title, name = called or f"lines {first} to {last}", names[0] if len(names) == 1 else ""
        if names or len(code) > 1 or len(body) >= TELLING:
            yield Unit(name, title, "code", first, last, "", "", body, f"\n{body}", len(code))


def windows(text: str, size: int, before: int = 0) -> Iterator[Unit]:
    """At most `size` lines, each `size // 2` after the one before. Blank windows are left out. `before`: lines above `text`."""
    lines = split_lines(text)
    step = max(1, size // 2)
    for start in range(0, max(1, len(lines) - size + step), step):
        part = lines[start : start + size]
        code = [line for line in part if line.strip()]
        if not code:
            continue
        first, last = before + start + 1, before + start + len(part)
        body = textwrap.dedent("\n".join(part)).strip("\n")
        yield Unit("", f"lines {first} to {last}", "lines", first, last, "", "", body, f"\n{body}", len(code))
