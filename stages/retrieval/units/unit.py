"""A unit of source code before it is a row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Unit:
    """A function, method, class or window of lines in one file. `kind` says which. `first_line` and `last_line` count
    from 1. `signature` is the text up to the colon that opens the body. `body` is the code without the docstring; for a
    class, it is the signatures of the methods. `rest` is the code from the first parenthesis on, without the docstring.
    `code_lines` is the number of lines of the body that hold code.
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
