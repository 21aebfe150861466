"""Find the tables and keys of TOML, YAML and JSON, by lines and indentation: parsers do not say where a key stands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from stages.retrieval.texts import split_lines
from stages.retrieval.units.unit import GROUP, Span, Unit, code_units, windows

TABLE = re.compile(r"\[{1,2}([\w.\"' -]+)\]{1,2}\s*(?:#.*)?$")
# What a line begins with, after its indentation. An item of a list of YAML has no name.
KEYS = {
    "toml": re.compile(r"""([\w."'-]+)[ \t]*="""),
    "yaml": re.compile(r"""-(?:\s|$)|["']?([^\s"'#:{\[-][^"'#:]*)["']?:(?:\s|$)"""),
    "json": re.compile(r'"([^"]+)"[ \t]*:'),
}
SIGNS = ("#",)
Mark = tuple[int, int, str]  # index of the line of a key, its indentation, its name


def config_units(language: str, text: str, window: int) -> list[Unit]:
    """Tables of TOML and keys of the first level, small ones that follow each other together. One of more than `window` lines is
    divided into its own keys; if it has none, as a list of data, its first `window` lines are the unit.
    """
    lines = split_lines(text)
    spans: list[Span] = []
    for first, last, names in _spans(lines, _marks(lines, language), window, len(lines)):
        if spans and names == spans[-1][2] and last - spans[-1][0] < GROUP:  # items of a list
            first = spans.pop()[0]
        spans.append((first, min(last, first + window - 1), names))
    return list(code_units(lines, spans, len(lines) + 1, SIGNS) if spans else islice(windows(text, window), 1))


def _marks(lines: Sequence[str], language: str) -> list[Mark]:
    if language == "json" and next((line for line in lines if line.strip()), "").lstrip().startswith("["):
        return []  # its keys are those of records
    found = []
    for number, line in enumerate(lines):
        bare = line.lstrip()
        if language == "toml" and (table := TABLE.match(bare)):
            found.append((number, -1, table[1].strip()))  # all keys below it are its own
        elif key := KEYS[language].match(bare):
            found.append((number, len(line) - len(bare), (key[1] or "").strip("\"' ")))
    return found


def _spans(lines: Sequence[str], marks: list[Mark], window: int, end: int, above: tuple[str, ...] = ()) -> Iterator[Span]:
    """Of the keys with the least indentation. `end`: index of the line after the last one."""
    least = min((indent for _, indent, _ in marks), default=0)
    places = [place for place, mark in enumerate(marks) if mark[1] == least]
    if places and places[0]:  # of TOML, keys before the first table
        yield from _spans(lines, marks[: places[0]], window, marks[places[0]][0], above)
    for place, following in pairwise([*places, len(marks)] if places else []):
        first, _, name = marks[place]
        after = marks[following][0] if following < len(marks) else end
        inner, named = marks[place + 1 : following], (*above, name) if name else above
        if after - first > window and inner and not _telling(lines[first + 1 : inner[0][0]]):
            (_, last, names), *others = _spans(lines, inner, window, after, named)
            yield first + 1, last, names
            yield from others
            continue
        while after > first + 1 and not _telling(lines[after - 1 : after]):
            after -= 1  # a comment above the next key
        yield first + 1, after, [".".join(named)] if named else []


def _telling(lines: Sequence[str]) -> bool:
    return any(line.strip() and not line.strip().startswith(SIGNS) for line in lines)
