"""Builds the config dataclasses from parsed TOML. Every mistake is a ValueError of one line."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from pipeline.project.synonyms import name_here
from stages.settings import check_value

SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 80
NAMES = {  # type -> its name in an error, singular and plural
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    bool: ("true or false", "true or false"),
}


class Parser:
    """`sections`: name -> dataclass. `place(key)` says where a key was set, for messages: "project.toml [train]"."""

    def __init__(self, sections: Mapping[str, type], place: Callable[[str], str]) -> None:
        self.place = place
        self.sections = dict(_nested(sections))  # with the sections inside sections, such as train.ema
        self.repeated = dict(_repeated(self.sections))  # sections that may be given several times: [[images.folder]]

    def section(self, name: str, raw: Any) -> Any:
        """The dataclass of the section `name`, such as "train" or "train.ema"."""
        if not isinstance(raw, Mapping):
            raise ValueError(
                f"{name} must be a section: write its settings below a line [{name}], got {shown(raw)} ({self.place(name)})"
            )
        kind = self.sections.get(name) or self.repeated[name]
        hints = _hints(kind)
        for key in raw:
            if key not in hints:
                raise ValueError(f"{name}.{key} is not a setting{self._remedy(name, key)} ({self.place(f'{name}.{key}')})")
        values = {key: self._value(hints[key], value, f"{name}.{key}") for key, value in raw.items()}
        try:
            for field in dataclasses.fields(kind):
                check_value(field, values.get(field.name))
            return kind(**values)
        except ValueError as error:
            message = str(error).removeprefix(f"{name}.").removeprefix(f"{name.rpartition('.')[2]}: ")
            key = re.match(r"\w*", message)
            raise ValueError(f"{name}.{message} ({self.place(f'{name}.{key[0] if key else str()}')})") from None

    def _remedy(self, name: str, key: str) -> str:
        holders = self.holders(key)
        if holders and name not in self.repeated:
            return f"; [{holders[0]}] has it"
        kind = self.sections.get(name) or self.repeated[name]
        names = _names(kind)
        here = name_here(key)
        kinds = self.sections | {name: kind}
        called = [other for other in dict.fromkeys([name, *self.holders(here)]) if here in _names(kinds[other])]
        if called:
            return f"; did you mean {here if called[0] == name else f'{called[0]}.{here}'}?"
        return nearest(key, names) or f"; [{name}] has {', '.join(names)}"

    def holders(self, key: str) -> list[str]:
        """The sections that have a setting `key`."""
        return [name for name, kind in self.sections.items() if key in _names(kind)]

    def _value(self, hint: Any, value: Any, name: str) -> Any:
        if name in self.sections and value is not None:
            return self.section(name, value)
        if name in self.repeated and isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            return tuple(self.section(name, item) for item in value)
        try:
            return _convert(hint, value)
        except TypeError:
            raise ValueError(
                f"{name} must be {_describe(hint)}{_example(hint, value)}, got {shown(value)} ({self.place(name)})"
            ) from None


def shown(value: Any) -> str:
    """Python code, shortened."""
    return SHORT.repr(value)


def nearest(word: Any, words: Iterable[str]) -> str:
    """The end of a message about an unknown name, "; did you mean train?", or ""."""
    found = difflib.get_close_matches(str(word), list(words), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _nested(sections: Mapping[str, type]) -> Iterable[tuple[str, type]]:
    """(dotted name, dataclass) of the sections and of those inside them, such as "train.ema"."""
    for name, kind in sections.items():
        yield name, kind
        for key, hint in _hints(kind).items():
            yield from _nested({f"{name}.{key}": each for each in _members(hint) if _is_section(each)})


def _repeated(sections: Mapping[str, type]) -> Iterable[tuple[str, type]]:
    """(dotted name, dataclass of an item) of the settings that are lists of sections, such as [[images.folder]]."""
    for name, kind in sections.items():
        for key, hint in _hints(kind).items():
            items = [arg for each in _members(hint) if typing.get_origin(each) is tuple for arg in typing.get_args(each)]
            yield from ((f"{name}.{key}", item) for item in items if _is_section(item))


# Evaluating the annotations, which are text, takes most of the time of opening a project.
@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def _is_section(kind: Any) -> TypeGuard[type]:
    return dataclasses.is_dataclass(kind)


def _names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a union; another type is its only member."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def _is_choice(value: Any, choices: Iterable[Any]) -> bool:
    # True == 1, so the types count.
    return any(value == each and type(value) is type(each) for each in choices)


# msgspec 0.22 could replace only this function: it passes unknown keys, inf and nan, and names neither the value nor a
# mapping's key. pydantic 2.14 needs dataclasses of its own and 0.12 s more CPU time at every start.
def _convert(hint: Any, value: Any) -> Any:
    """Parsed TOML as the annotated type: list to tuple, int to float. Raises TypeError, also for infinity and NaN."""
    for kind in _members(hint):
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Literal and _is_choice(value, args):
            return value
        if origin is tuple and isinstance(value, list | tuple):
            return tuple(_convert(args[0], item) for item in value)
        if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
            return {key: _convert(args[1], item) for key, item in value.items()}
        if kind is float and type(value) in (int, float) and math.isfinite(value):
            return float(value)
        if kind is str and isinstance(value, os.PathLike):
            return os.fspath(value)
        if type(value) is kind and kind is not float:
            return value
    raise TypeError


def _describe(hint: Any) -> str:
    """A type in words: "a whole number", "a list of strings", "'a' or 'b'"."""
    words: list[str] = []
    for kind in _members(hint):
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Literal:
            words += [repr(each) for each in args]
        elif origin is tuple:
            items = "sections" if _is_section(args[0]) else NAMES[args[0]][1] if args[0] in NAMES else _describe(args[0])
            words.append(f"a list of {items}")
        elif args:
            many = NAMES[args[1]][1] if args[1] in NAMES else _describe(args[1]).replace("a list", "lists")
            words.append(f"a section of names with {many}")
        elif kind is not types.NoneType:
            words.append(NAMES[kind][0] if kind in NAMES else "a section")
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _example(hint: Any, value: Any) -> str:
    """Such as ", such as [512]" if the user wrote 512 for a list; empty if a list would be wrong too."""
    try:
        return f", such as {[value]!r}" if _convert(hint, [value]) else ""
    except TypeError:
        return ""
