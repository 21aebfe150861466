"""Checks the sizes in a config.json, types and bounds, before a shape is computed from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

MOST = 10_000_000  # of a size without bounds of its own: no vocabulary and no width is larger
ITEMS = 16  # of a list of sizes
BOUNDS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("num_layers", "num_single_layers", "num_hidden_layers"), (0, 1000)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "norm_num_groups"), (1, 1024)),
    **dict.fromkeys(("attention_head_dim", "head_dim", "d_kv"), (1, 4096)),
    **dict.fromkeys(("eps", "rms_norm_eps", "batch_norm_eps", "layer_norm_epsilon"), (1e-20, 1.0)),
    "layers_per_block": (1, 16),
    "mlp_ratio": (0.01, 100.0),
    "rope_theta": (1.0, 1e15),
}


def checked_sizes(kind: type, content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values of the fields of `kind`, lists as tuples. Raises ValueError for a wrong type or a size that no model has."""
    fields = [field for field in dataclasses.fields(kind) if field.name in content]
    return {field.name: _checked(str(field.type), field.name, content[field.name], where) for field in fields}


def _checked(kind: str, name: str, value: Any, where: str) -> Any:
    if value is None and "None" in kind:
        return None
    if kind.startswith("tuple"):
        if not isinstance(value, list | tuple) or not 1 <= len(value) <= ITEMS:
            raise ValueError(f"{where}: {name} must be a list of 1 to {ITEMS} sizes, got {_short(value)}")
        return tuple(_checked("int", name, item, where) for item in value)
    if kind == "bool":
        if not isinstance(value, bool):
            raise ValueError(f"{where}: {name} must be true or false, got {_short(value)}")
        return value
    low, high = BOUNDS.get(name, (1, MOST))
    numbers: tuple[type, ...] = (int,) if kind == "int" else (int, float)
    # `type`, as a bool is an int. 1e300, as isfinite raises OverflowError for a larger int.
    if type(value) not in numbers or not math.isfinite(value if abs(value) < 1e300 else math.inf) or not low <= value <= high:
        what = "a whole number" if kind == "int" else "a number"
        raise ValueError(f"{where}: {name} must be {what} from {low:g} to {high:g}, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) > 10**30:
        return "a number of more than 30 digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
