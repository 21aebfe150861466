"""The three kinds of settings, and the check of their bounds.

A section of project.toml is a frozen dataclass whose fields are made by `setting`, `selects` and `runtime`.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from typing import Any


def setting(default: Any, doc: str) -> Any:
    """Declare a config field whose value changes the content of rows. Return a field for the body of a config
    dataclass. The field is part of the recipe (the hash that names a table's folder). Another value therefore starts a
    new table. `default` is the field's default. `doc` names the unit and the reason for the default. Raises TypeError
    if the default is mutable.
    """
    return _field(default, doc, "setting")


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


def _field(default: Any, doc: str, kind: str) -> Any:
    if isinstance(default, list | dict | set):
        raise TypeError("a default must be immutable: use a tuple")
    return dataclasses.field(default=default, metadata={"doc": doc, "kind": kind})


def toml_string(text: str) -> str:
    """Return `text` as a basic string of TOML: in double quotes, with special characters escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
