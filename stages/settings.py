"""The three kinds of settings, and the check of their bounds.

A section of project.toml is a frozen dataclass whose fields are made by `setting`, `selects` and `runtime`.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Mapping
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
    bounds: Limits | None = None,
    unrecorded: tuple[Any, ...] = (),
    follows: str = "",
    unless: str = "",
    path: bool = False,
) -> Any:
    """Return a field for a config dataclass: a setting whose value changes the content of rows. `default` is the
    setting's default value. `doc` explains the setting. `bounds` is (smallest, largest) allowed number, or None.
    `unrecorded` lists values that are left out of the recipe (the record whose hash names a table's folder). `follows`
    names another setting, such as "train.base_bits". A field whose value is None takes the value of that setting.
    `unless` names another field of the same dataclass. If the field that `unless` names is not None, `follows` has no
    effect. `path` is True for a path or a tuple of paths.

    `follows` and `unless` are "" if they are not used. For example, `base_bits_for` of the section [samples] has
    `follows="train.base_bits_for"` and `unless="base_bits"`. If both settings of [samples] are None, `base_bits_for`
    gets the value of [train]. If `base_bits` is 8 and `base_bits_for` is None, `base_bits_for` stays None.

    The field is part of the recipe, so a different value starts a new table. With a value in `unrecorded`, the recipe
    is that of a project without the field. Use `unrecorded` for a field that is added later. With the value that means
    "as before", existing tables then keep their names.

    For a tuple or a mapping, `bounds` applies to each value. Raises TypeError if `default` is mutable.
    """
    return _field(default, doc, "setting", bounds, unrecorded=unrecorded, follows=follows, unless=unless, path=path)


def selects(default: Any, doc: str, *, bounds: Limits | None = None, follows: str = "", path: bool = False) -> Any:
    """Return a field for a config dataclass: a setting that decides which rows a table has. `doc` explains the setting.
    `bounds` is (smallest, largest) allowed number, or None. `follows` names another setting, such as
    "captions.sources", or is "". If the field is None, the value of that setting is used. `path` is True if the value
    is a path or a tuple of paths. Raises TypeError if `default`, the default value, is mutable.

    The value does not change the content of a row. It is not part of the recipe: the hash that names a table's folder.
    For a tuple or a mapping, `bounds` applies to each value.
    """
    return _field(default, doc, "selects", bounds, follows=follows, path=path)


def runtime(default: Any, doc: str, *, bounds: Limits | None = None) -> Any:
    """Return a field for a config dataclass: a setting that has no effect on the rows of the stage's table. For
    example, the number of threads changes how fast rows are computed. The rows are the same with any number of threads.
    `default` is the setting's default value. `doc` explains the setting. `bounds` is (smallest, largest) allowed
    number, or None. Raises TypeError if `default` is mutable.

    The field is not part of the recipe (the hash that names a table's folder). For a tuple or a mapping, `bounds`
    applies to each value.
    """
    return _field(default, doc, "runtime", bounds)


def require(section: Any, name: str, low: float | None = None, high: float | None = None, *, below: float | None = None) -> None:
    """Raise ValueError unless a numeric setting lies within its bounds. `section` is the config dataclass. `name` is the
    name of its field. The value must be at least `low`, at most `high` and less than `below`. A bound of None is not
    checked. A setting whose value is None passes. An example of the message is "steps must be >= 1, got 0".

    Call it in `__post_init__` of the dataclass. The reader of project.toml adds the section and the place, and the user sees
    "train.steps must be >= 1, got 0 (project.toml [train])". Other checks raise a ValueError of the same form: the setting's
    name, "must be", what would be right, "got", the value.
    """
    value = getattr(section, name)
    bounds = ((">=", low, operator.ge), ("<=", high, operator.le), ("<", below, operator.lt))
    given = [(sign, bound, holds) for sign, bound, holds in bounds if bound is not None]
    if value is not None and not all(holds(value, bound) for _, bound, holds in given):
        raise ValueError(f"{name} must be {' and '.join(f'{sign} {bound}' for sign, bound, _ in given)}, got {value}")


def follow(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the config sections in which unset settings (None) are filled in. Each takes the value of a
    setting that its declaration names. For example, a field declared with `setting(..., follows="train.base_bits")`
    takes the value of `base_bits` in [train]. The field stays None if there is no such setting. `sections` maps the
    name of a section to its config dataclass.

    A declaration can also have `unless="other"`. The field then stays None while the field `other` of its section is
    set.
    """
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
    """Raise ValueError if a field of the config dataclass `section` has an invalid value. Each field is checked by
    `check_value`. Call the function in `__post_init__`.
    """
    for field in dataclasses.fields(section):
        check_value(field, getattr(section, field.name))


def check_value(field: dataclasses.Field[Any], value: Any) -> None:
    """Raise ValueError if a config field may not have the value `value`. A number must lie within the bounds of
    `field`. Without bounds, an int must fit into 32 signed bits, and a float must lie between -1e9 and 1e9. A text must
    not contain a zero byte.

    A tuple or mapping must have at most 10,000 values, and each value is checked in the same way.
    """
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
    long = isinstance(number, int) and number.bit_length() > 100
    return "a number of more than 30 digits" if long else str(number)


def _field(default: Any, doc: str, kind: str, bounds: Limits | None, **more: Any) -> Any:
    if isinstance(default, list | dict | set):
        raise TypeError("a default must be immutable: use a tuple")
    return dataclasses.field(default=default, metadata={"doc": doc, "kind": kind, "bounds": bounds, **more})


def toml_string(text: str) -> str:
    """Return `text` as a basic string of TOML: in double quotes, with special characters escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
