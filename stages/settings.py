"""The three kinds of settings, and the check of their bounds.

A section of project.toml is a frozen dataclass whose fields are made by `setting`, `selects` and `runtime`.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Mapping
from typing import Any


def setting(default: Any, doc: str, *, unrecorded: tuple[Any, ...] = (), follows: str = "", unless: str = "") -> Any:
    """Declare a config field whose value changes the content of rows. Return a field for the body of a config
    dataclass. The field is part of the recipe (the hash that names a table's folder). Another value therefore starts a
    new table. `default` is the field's default. `doc` names the unit and the reason for the default. Raises TypeError
    if the default is mutable.

    With a value in `unrecorded`, the field is left out of the recipe. Use it for a setting that is added later: the
    value that means "as before" must not rename existing tables. `follows` names a setting of another section, such as
    "train.base_bits". While the field is None, it takes the value of that setting. If the field `unless` of the same
    section is set, it stays None.
    """
    return _field(default, doc, "setting", unrecorded=unrecorded, follows=follows, unless=unless)


def selects(default: Any, doc: str) -> Any:
    """Declare a config field whose value decides which rows exist. Return a field for the body of a config dataclass.
    The field's value does not change the values in a row. It is not part of the recipe (the hash that names a table's
    folder). `default` is the field's default. `doc` names the unit and the reason for the default. Raises TypeError if
    the default is mutable.
    """
    return _field(default, doc, "selects")


def runtime(default: Any, doc: str) -> Any:
    """Declare a config field whose value changes no row, such as a batch size. Return a field for the body of a config
    dataclass. The field is not part of the recipe (the hash that names a table's folder). `default` is the field's
    default. `doc` names the unit and the reason for the default. Raises TypeError if the default is mutable.
    """
    return _field(default, doc, "runtime")


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
    """Return the sections with every setting filled in that follows a setting of another section. `sections` maps the
    name of a section to its config dataclass. Settings whose source does not exist stay None.
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


def _field(default: Any, doc: str, kind: str, **more: Any) -> Any:
    if isinstance(default, list | dict | set):
        raise TypeError("a default must be immutable: use a tuple")
    return dataclasses.field(default=default, metadata={"doc": doc, "kind": kind, **more})


def toml_string(text: str) -> str:
    """Return `text` as a basic string of TOML: in double quotes, with special characters escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
