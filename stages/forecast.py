"""The contract of forecasts: what a stage needs, computed from shapes before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from schemas.table import TableSchema


@dataclass(frozen=True)
class Outlook:
    """Everything that a forecast of a stage may use. `sections` maps the name of a section to its settings. `family` is the
    record of the model family, or None. `budget` is the bytes of memory that a stage may take. `weights(name)` returns the
    path of a component that is on this machine, else None. `rows(schema)` returns the rows of a built table, else None.
    """

    sections: Mapping[str, Any]
    family: Any
    budget: int
    weights: Callable[[str], Path | None] = lambda name: None
    rows: Callable[[TableSchema], pa.Table | None] = lambda schema: None


@dataclass(frozen=True)
class Forecast:
    """What a stage needs, computed from shapes before it runs. `peak` is the most memory in use by MLX, in bytes. `row_bytes` is
    the mean size of a row's tensors or files on disk. `rows` is the number of rows if the settings give it. `file_bytes` is the
    size of other files. `plan` says in words how the stage computes. If `peak` exceeds the budget, `remedy` names settings with
    which the stage would fit; it is empty if there are none.
    """

    peak: int
    row_bytes: int = 0
    rows: int | None = None
    file_bytes: int = 0
    plan: str = ""
    remedy: str = ""
