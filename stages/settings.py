"""The three kinds of settings, and the check of their bounds. A section of project.toml is a frozen dataclass of such fields."""

from __future__ import annotations

import dataclasses
import difflib
import json
import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Limits = tuple[float, float]  # the smallest and the largest allowed number

WHOLE: Limits = (-(2**31), 2**31 - 1)  # of a whole number without bounds of its own
NUMBER: Limits = (-1e9, 1e9)  # of another number without bounds of its own
SEEDS: Limits = (0, 2**32 - 1)
MOST_ITEMS = 10_000  # of a list or section of names


def setting(
    default: Any,
    doc: str,
    *,
    bounds: Limits | None = None,  # of each value of a tuple or mapping
    # The recipe is as if the field did not exist. A field that is added later lists the value that means "as before" here, so
    # that existing tables keep their names.
    unrecorded: tuple[Any, ...] = (),
    follows: str = "",  # the setting, such as "train.base_bits", whose value is taken for None
    unless: str = "",  # not while this field of the same section is set
    path: bool = False,  # a path or a tuple of paths
) -> Any:
    """A field that is part of the recipe: another value starts a new table. Raises TypeError for a mutable default."""
    return _field(default, doc, "setting", bounds, unrecorded=unrecorded, follows=follows, unless=unless, path=path)


def selects(default: Any, doc: str, *, bounds: Limits | None = None, follows: str = "", path: bool = False) -> Any:
    """A field that decides which rows a table has, not what they contain. Not in the recipe."""
    return _field(default, doc, "selects", bounds, follows=follows, path=path)


def runtime(default: Any, doc: str, *, bounds: Limits | None = None) -> Any:
    """A field that no row depends on, such as a number of threads. Not in the recipe."""
    return _field(default, doc, "runtime", bounds)


def require(section: Any, name: str, low: float | None = None, high: float | None = None, *, below: float | None = None) -> None:
    """Raises ValueError such as "steps must be >= 1, got 0". For `__post_init__`. None passes."""
    value = getattr(section, name)
    bounds = ((">=", low, operator.ge), ("<=", high, operator.le), ("<", below, operator.lt))
    given = [(sign, bound, holds) for sign, bound, holds in bounds if bound is not None]
    if value is not None and not all(holds(value, bound) for _, bound, holds in given):
        # The reader of project.toml puts the section before the message and the place after it, so every check begins with
        # the field's name.
        raise ValueError(f"{name} must be {' and '.join(f'{sign} {bound}' for sign, bound, _ in given)}, got {value}")


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
        found[name] = dataclasses.replace(section, **changes)
    return found


def check_bounds(section: Any) -> None:
    """`check_value` for each field. For `__post_init__`."""
    for field in dataclasses.fields(section):
        check_value(field, getattr(section, field.name))


def check_value(field: dataclasses.Field[Any], value: Any) -> None:
    """Raises ValueError for a number out of bounds, a text with a zero byte, or more than MOST_ITEMS items."""
    many = isinstance(value, tuple | Mapping)
    if many and len(value) > MOST_ITEMS:
        raise ValueError(f"{field.name} must have at most {MOST_ITEMS} items, got {len(value)}")
    for item in (value.values() if isinstance(value, Mapping) else value) if many else (value,):
        if isinstance(item, str) and "\0" in item:
            raise ValueError(f"{field.name} must be a text without zero bytes, got {item!r}")
        if isinstance(item, bool) or not isinstance(item, int | float):
            continue
        low, high = field.metadata.get("bounds") or (WHOLE if isinstance(item, int) else NUMBER)
        if not low <= item <= high:
            each = " each" if many else ""
            raise ValueError(f"{field.name} must be >= {low:.12g} and <= {high:.12g}{each}, got {_short(item)}")


def _short(number: float) -> str:
    # str() raises for a whole number of more than 4,300 digits, and TOML has such numbers.
    long = isinstance(number, int) and number.bit_length() > 100
    return "a number of more than 30 digits" if long else str(number)


def _field(default: Any, doc: str, kind: str, bounds: Limits | None, **more: Any) -> Any:
    if isinstance(default, list | dict | set):
        raise TypeError("a default must be immutable: use a tuple")
    return dataclasses.field(default=default, metadata={"doc": doc, "kind": kind, "bounds": bounds, **more})


def from_home(path: str | Path) -> Path:
    """`path` with ~ as the user's folder."""
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


def toml_string(text: str) -> str:
    # TOML forbids DEL in a string; JSON does not escape it.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
