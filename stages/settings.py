"""A section of project.toml is a frozen dataclass of settings of three kinds, with their bounds."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Limits = tuple[float, float]  # the smallest and the largest allowed number

WHOLE: Limits = (-(2**31), 2**31 - 1)  # of a whole number without bounds of its own
NUMBER: Limits = (-1e9, 1e9)  # of another number without bounds of its own
COUNT: Limits = (1, WHOLE[1])
SEEDS: Limits = (0, 2**32 - 1)
MOST_ITEMS = 10_000  # of a list or section of names


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",  # of a number
    bounds: Limits | None = None,  # of each value of a tuple or mapping
    # The recipe is as if the field did not exist. A field that is added later lists the value that means "as before" here, so
    # that existing tables keep their names.
    unrecorded: tuple[Any, ...] = (),
    follows: str = "",  # the setting, such as "train.base_bits", whose value is taken for None
    unless: str = "",  # not while this field of the same section is set
    path: bool = False,  # a path or a tuple of paths
) -> Any:
    """A field that is part of the recipe: another value starts a new table. Raises TypeError for a mutable default."""
    return _field(default, doc, "setting", bounds, unit=unit, unrecorded=unrecorded, follows=follows, unless=unless, path=path)


def selects(
    default: Any, doc: str, *, unit: str = "", bounds: Limits | None = None, follows: str = "", path: bool = False
) -> Any:
    """A field that decides which rows a table has, not what they contain. Not in the recipe."""
    return _field(default, doc, "selects", bounds, unit=unit, follows=follows, path=path)


def runtime(default: Any, doc: str, *, unit: str = "", bounds: Limits | None = None) -> Any:
    """A field that no row depends on, such as a number of threads. Not in the recipe."""
    return _field(default, doc, "runtime", bounds, unit=unit)


@dataclasses.dataclass(frozen=True)
class Section:
    """The base of all sections: its values are within their bounds, whoever makes it.

    Raises ValueError such as "steps must be >= 1, got 0". The reader of project.toml puts the section before the message and the
    place after it, so every check begins with the field's name.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not field.default:
                _check_value(field, value)
        self.check()

    def check(self) -> None:
        """Raises ValueError for values that do not go together."""


def follow(sections: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which settings that are None have the value of the setting that they follow."""
    found = dict(sections)
    for name, section in sections.items():
        changes = {}
        for field in dataclasses.fields(section):
            other, _, key = str(field.metadata.get("follows", "")).partition(".")
            unless = field.metadata.get("unless")
            set_already = getattr(section, field.name) is not None or (unless and getattr(section, unless) is not None)
            if key and not set_already and hasattr(sections.get(other), key):
                changes[field.name] = getattr(sections[other], key)
        found[name] = dataclasses.replace(section, **changes) if changes else section
    return found


def _check_value(field: dataclasses.Field[Any], value: Any) -> None:
    """Raises ValueError for a number out of bounds, a text with a zero byte, or more than MOST_ITEMS items."""
    many = isinstance(value, tuple | Mapping)
    if many and len(value) > MOST_ITEMS:
        raise ValueError(f"{field.name} must have at most {MOST_ITEMS} items, got {len(value)}")
    for key, item in value.items() if isinstance(value, Mapping) else [("", each) for each in (value if many else (value,))]:
        if isinstance(item, str) and "\0" in item:
            raise ValueError(f"{field.name} must be a text without zero bytes, got {item!r}")
        if isinstance(item, bool) or not isinstance(item, int | float):
            continue
        low, high = field.metadata.get("bounds") or (WHOLE if isinstance(item, int) else NUMBER)
        if not low <= item <= high:
            # A limit that every number has is named only to whom it stops.
            above = [f">= {low:.12g}"] if item < low or low not in (WHOLE[0], NUMBER[0]) else []
            below = [f"<= {high:.12g}"] if item > high or high not in (WHOLE[1], NUMBER[1]) else []
            # str() raises for a whole number of more than 4,300 digits, and TOML has such numbers.
            got = "a number of more than 30 digits" if isinstance(item, int) and item.bit_length() > 100 else str(item)
            wanted = f"{' and '.join([*above, *below])}{' each' if many else ''}"
            raise ValueError(f"{field.name} must be {wanted}, got {got}{f' for {key!r}' if key else ''}")


def _field(default: Any, doc: str, kind: str, bounds: Limits | None, **more: Any) -> Any:
    if isinstance(default, list | dict | set):
        raise TypeError("a default must be immutable: use a tuple")
    return dataclasses.field(default=default, metadata={"doc": doc, "kind": kind, "bounds": bounds, **more})


def from_home(path: str | Path) -> Path:
    with suppress(RuntimeError):  # an unknown user, such as ~x
        return Path(path).expanduser()
    return Path(path)


def setting_path(text: str, project: Path) -> Path:
    """The path that a setting names: relative to the project, or absolute; ~ is the user's folder."""
    return project / from_home(text)


def nearest(word: Any, words: Iterable[str], form: str = "{}", cutoff: float = 0.6) -> str:
    """The end of a message about an unknown name, "; did you mean train?", or ""."""
    found = difflib.get_close_matches(str(word), list(words), 1, cutoff)
    return f"; did you mean {form.format(found[0])}?" if found else ""


def several(count: int, unit: str) -> str:
    """1 picture, 2 pictures, 3 queries."""
    return f"{count} {unit if count == 1 else f'{unit[:-1]}ies' if unit.endswith('y') else f'{unit}s'}"


def toml_string(text: str) -> str:
    # TOML forbids DEL in a string; JSON does not escape it.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
