"""The optimizers that the setting `kind` of [train.optimizer] can name, and the bounds of their numbers."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from stages.tuner.optimizers.adafactor import Adafactor
from stages.tuner.optimizers.adamw import AdamW
from stages.tuner.optimizers.adamw8bit import AdamW8bit
from stages.tuner.optimizers.lion import Lion
from stages.tuner.optimizers.prodigy import Prodigy
from stages.tuner.optimizers.protocol import Method

MethodName = Literal["adamw", "adamw8bit", "adafactor", "lion", "prodigy"]

METHODS: dict[str, Callable[..., Method]] = {
    "adamw": AdamW,
    "adamw8bit": AdamW8bit,
    "adafactor": Adafactor,
    "lion": Lion,
    "prodigy": Prodigy,
}
LIMITS = {  # number -> (least value, value that it must stay below)
    **dict.fromkeys(("beta1", "beta2", "beta3"), (0.0, 1.0)),
    **dict.fromkeys(("d0", "d_coef", "clip_threshold", "decay_rate"), (1e-30, math.inf)),
    "eps": (1e-30, math.inf),  # with 0, an array without a gradient, as A is in the first step, would be 0 / 0
    **dict.fromkeys(("floor", "weight_decay"), (0.0, math.inf)),
}


def make_optimizer(name: str, **numbers: Any) -> Method:
    """Raises ValueError for an unknown kind or field, and for a number out of range."""
    if name not in METHODS:
        raise ValueError(f"kind must be one of {', '.join(METHODS)}, got {name!r}{_nearest(name, METHODS)}")
    fields = [field.name for field in dataclasses.fields(METHODS[name])]  # type: ignore[arg-type]
    for number, value in numbers.items():
        if number not in fields:
            raise ValueError(f"{number} is not a setting of {name}, which has {', '.join(fields)}{_nearest(number, fields)}")
        _check_range(number, value)
    return METHODS[name](**numbers)


def _check_range(number: str, value: float | None) -> None:
    if number not in LIMITS or value is None:
        return
    low, high = LIMITS[number]
    if not low <= value < high:
        below = "" if high == math.inf else f" and < {high:g}"
        raise ValueError(f"{number} must be >= {low:g}{below}, got {value}")


def _nearest(word: str, words: Iterable[str]) -> str:
    return "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(word, words, n=1))
