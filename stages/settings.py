"""The three kinds of settings, and the check of their bounds.

A section of project.toml is a frozen dataclass whose fields are made by `setting`, `selects` and `runtime`.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from typing import Any


def setting(default: Any, doc: str) -> Any:
    """Declare a setting that changes the values of rows; it is part of the recipe. `doc`: the unit, and why this default."""
    return _field(default, doc, "setting")


def selects(default: Any, doc: str) -> Any:
    """Declare a setting that changes which rows exist, but not their values. It is read by `wants` and not part of the recipe."""
    return _field(default, doc, "selects")


def runtime(default: Any, doc: str) -> Any:
    """Declare a setting that changes no row, such as the batch size, the number of workers or how often to save."""
    return _field(default, doc, "runtime")


def require(section: Any, name: str, low: float | None = None, high: float | None = None, *, below: float | None = None) -> None:
    """Check that a numeric setting lies within its bounds: low <= value <= high and value < below.

    Call it in `__post_init__` of the section's dataclass. A bound that is None is not checked; a setting that is None passes.
    ValueError such as "steps must be >= 1, got 0". The reader of project.toml adds the section and the place, and the user
    sees "train.steps must be >= 1, got 0 (project.toml [train])". Other checks raise a ValueError of the same form:
    the setting's name, "must be", what would be right, "got", the value.
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
    """Return a text as a TOML basic string, with its quotes."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
