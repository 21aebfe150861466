"""The three kinds of settings. A section of project.toml is a frozen dataclass whose fields are made by these functions."""

from __future__ import annotations

import dataclasses
from typing import Any


def setting(default: Any, doc: str) -> Any:
    """A setting that changes the values of rows; it is part of the recipe. `doc` gives the unit and the reason of the default."""
    return _field(default, doc, "setting")


def selects(default: Any, doc: str) -> Any:
    """A setting that changes which rows exist, but not their values; `wants` reads it, and it is not part of the recipe."""
    return _field(default, doc, "selects")


def runtime(default: Any, doc: str) -> Any:
    """A setting that changes no row, such as batch size, number of workers or how often to save."""
    return _field(default, doc, "runtime")


def _field(default: Any, doc: str, kind: str) -> Any:
    if isinstance(default, list | dict | set):
        raise TypeError("a default must be immutable: use a tuple")
    return dataclasses.field(default=default, metadata={"doc": doc, "kind": kind})
