"""A unit of source code before it is a row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Unit:
    """A function, method, class or window of lines from a source file. `kind` says which. `qualified_name` is the name
    with the enclosing classes, such as "Outer.f". `first_line` and `last_line` are line numbers in the file, from 1.
    `signature` is the code before the body, such as "def f(x):". `body` is the code after the signature. `rest` is all
    code after the name, so it has the parameters and the body, such as "(x): return x". `code_lines` is the number of
    lines of `body` that hold code.

    `body` and `rest` do not contain the docstring. For a Python class, both have only the signature of each method. In
    other languages, `docstring` is the comment before the function or class. A window has an empty `name`, `signature`
    and `docstring`, and its `qualified_name` is a text such as "lines 1 to 20".
    """

    name: str
    qualified_name: str
    kind: str  # function, method, class, lines
    first_line: int
    last_line: int
    signature: str
    docstring: str
    body: str
    rest: str
    code_lines: int


def package_of(path: str) -> str:
    """Return the package of a source file, such as "stdlib/email". `path` is the file's path in the table `sources`,
    such as "stdlib/email/parser.py". The package is the name of the source root and the first folder or module below
    it.
    """
    root, _, below = path.partition("/")
    return f"{root}/{PurePosixPath(below).parts[0].partition('.')[0]}" if below else root
