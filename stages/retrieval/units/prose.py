"""Find the sections of Markdown, the cells of notebooks and the functions of shell scripts."""

from __future__ import annotations

import json
import re
import textwrap
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from stages.retrieval.texts import split_lines
from stages.retrieval.units.unit import Unit, code_units, windows

FENCE = re.compile(r"\s{0,3}(```+|~~~+)")
HEADING = re.compile(r"(#{1,6})\s+(.*)")
UNDERLINE = re.compile(r"=+\s*$")  # below a heading of the first level


def markdown_units(text: str, window: int) -> list[Unit]:
    """A section is its heading and the text up to the next; of more than `window` lines, windows with its name."""
    lines = split_lines(text)
    found: list[Unit] = []
    for (first, level, _), (end, _, _), above in _sections(lines):
        titles = [title for _, _, title in above if title]
        part = "\n".join(lines[first:end]).rstrip()
        for unit in windows(part, window, first):
            called = " / ".join(titles) or unit.qualified_name
            name = titles[-1] if level and titles else ""
            found.append(Unit(name, called, "section", *_lines(unit), "", "", unit.body, unit.rest, unit.code_lines))
    return found


Heading = tuple[int, int, str]  # index of the line, level, text


def _sections(lines: list[str]) -> Iterator[tuple[Heading, Heading, list[Heading]]]:
    """(heading, the next, headings that it stands below, itself the last)."""
    headings: list[Heading] = [(0, 0, "")]
    fence = ""
    for number, line in enumerate(lines):
        if mark := FENCE.match(line):
            fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
        elif not fence and (found := HEADING.match(line)):
            headings.append((number, len(found[1]), found[2].rstrip().rstrip("#").rstrip()))
        elif not fence and number and UNDERLINE.match(line) and lines[number - 1].strip():
            headings.append((number - 1, 1, lines[number - 1].strip()))
    above: list[Heading] = []
    for one, other in pairwise([*headings, (len(lines), 0, "")]):
        above = [each for each in above if each[1] < one[1]] + [one]
        if other[0] > one[0]:
            yield one, other, above


def _lines(unit: Unit) -> tuple[int, int]:
    return unit.first_line, unit.last_line


def notebook_units(text: str) -> list[Unit] | None:
    """A unit per cell of code or prose, with its lines in the file; None if it is no notebook."""
    try:
        cells = json.loads(text)["cells"]
        sources = [(cell["cell_type"], _source(cell["source"])) for cell in cells]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    place, found = 0, []
    ends = [end.start() for end in re.finditer("\n", text)]
    for number, (kind, source) in enumerate(sources, 1):
        lines = [line for line in source.splitlines() if line.strip()]
        if kind not in ("code", "markdown") or not lines:
            continue
        first, last = (_find(text, line, place) for line in (lines[0], lines[-1]))
        place = max(place, first, last)
        at = [1 + bisect_left(ends, each) for each in sorted((first, max(first, last)))]
        body = textwrap.dedent(source).strip("\n")
        found.append(Unit("", f"cell {number}", "cell", at[0], at[1], "", "", body, f"\n{body}", len(lines)))
    return found


def _source(given: Any) -> str:
    return given if isinstance(given, str) else "".join(given)


def _find(text: str, line: str, start: int) -> int:
    """Index of a cell's line in the file; `start` if it is written in another way."""
    for ascii_only in (False, True):
        found = text.find(json.dumps(line, ensure_ascii=ascii_only)[1:-1], start)
        if found >= 0:
            return found
    return start


FUNCTION = re.compile(r"(\s*)(?:function\s+)?([\w:.-]+)\s*\(\s*\)\s*\{?|(\s*)function\s+([\w:.-]+)\s*\{?")
SIGNS = ("#",)


def shell_units(text: str, window: int) -> list[Unit]:
    """Functions with the comment above them as docstring; the lines between them are code. A function ends with a brace as far
    to the right as its first line.
    """
    lines = split_lines(text)
    found: list[Unit] = []
    loose: list[int] = []  # lines outside of functions, from 1
    endless: set[tuple[str, bool]] = set()  # indents for which no further line ends a function
    number = 0
    while number < len(lines):
        named = FUNCTION.match(lines[number])
        ending = (named[1] or named[3] or "", lines[number].rstrip().endswith("(")) if named else ("", False)
        end = _end(lines, number, ending[0]) if named and ending not in endless else 0
        if end < 0 and not _of_one_line(lines[number]):
            endless.add(ending)
        if not named or end <= number:
            loose += [number + 1] if lines[number].strip() and not lines[number].startswith("#!") else []
            number += 1
            continue
        above = number
        while above and lines[above - 1].strip().startswith("#") and not lines[above - 1].startswith("#!"):
            above -= 1
        docstring = "\n".join(line.strip().lstrip("#").strip() for line in lines[above:number]).strip()
        inside = lines[number + 1 : end]
        name, rest = named[2] or named[4], "\n".join(lines[number : end + 1]).strip()
        code = [line for line in inside if line.strip() and not line.strip().startswith("#")]
        body = textwrap.dedent("\n".join(inside)).strip("\n")
        after = rest[rest.index(name) + len(name) :]
        while loose and loose[-1] > above:
            loose.pop()
        found.append(Unit(name, name, "function", number + 1, end + 1, f"{name}()", docstring, body, after, len(code)))
        number = end + 1
    return found + list(code_units(lines, [(line, line, []) for line in loose], window, SIGNS))


def _of_one_line(line: str) -> bool:
    return line.rstrip().endswith("}") and "{" in line


def _end(lines: list[str], start: int, indent: str) -> int:
    """Index of the last line of the function that begins at `start`, or -1."""
    opened = lines[start].rstrip()
    if _of_one_line(opened):
        return -1
    for number in range(start + 1, len(lines)):
        if lines[number].startswith(f"{indent}}}") or (lines[number].rstrip() == f"{indent})" and opened.endswith("(")):
            return number
    return -1
