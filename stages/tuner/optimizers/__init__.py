"""Optimizers: pure functions over flat dicts of float32 arrays. Here, those that `kind` of [train.optimizer] names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from stages.settings import nearest
from stages.tuner.optimizers.adafactor import Adafactor
from stages.tuner.optimizers.adamw import AdamW, AdamW8bit
from stages.tuner.optimizers.lion import Lion
from stages.tuner.optimizers.optimizer import Method
from stages.tuner.optimizers.prodigy import Prodigy

MethodName = Literal["adamw", "adamw8bit", "adafactor", "lion", "prodigy"]

METHODS: dict[str, Callable[..., Method]] = {
    "adamw": AdamW,
    "adamw8bit": AdamW8bit,
    "adafactor": Adafactor,
    "lion": Lion,
    "prodigy": Prodigy,
}


def make_optimizer(name: str, **numbers: Any) -> Method:
    """Raises ValueError for an unknown kind or number. The bounds of the numbers are those of [train.optimizer]."""
    if name not in METHODS:
        raise ValueError(f"kind must be one of {', '.join(METHODS)}, got {name!r}{nearest(name, METHODS)}")
    fields = [field.name for field in dataclasses.fields(METHODS[name])]  # type: ignore[arg-type]
    for number in numbers:
        if number not in fields:
            raise ValueError(f"{number} is not a setting of {name}, which has {', '.join(fields)}{nearest(number, fields)}")
    return METHODS[name](**numbers)
