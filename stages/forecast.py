"""The contract of forecasts: what a stage needs, computed from shapes before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from schemas.table import TableSchema

PROGRAM_BYTES = 1_000_000_000  # at most, besides arrays: Python, libraries, a tokenizer, work memory of the matrix library


@dataclass(frozen=True)
class Outlook:
    """The facts from which the needs of a stage are forecast before the stage runs. `sections` maps the name of a
    section of project.toml to its settings. `family` is the record of the model family, or None. `budget` is the memory
    that the stage may take, in bytes.

    `weights(name)` returns the path of a component's weights, or None if the weights are not on this machine.
    `rows(schema)` returns the rows of a table as an Arrow table, or None if the table is not built.
    """

    sections: Mapping[str, Any]
    family: Any
    budget: int
    weights: Callable[[str], Path | None] = lambda name: None
    rows: Callable[[TableSchema], pa.Table | None] = lambda schema: None


@dataclass(frozen=True)
class Forecast:
    """The memory and disk space that a stage needs, computed before the stage runs. Sizes are in bytes. `peak` is the
    peak memory of MLX and large arrays, or 0 if small. `row_bytes` is the mean disk space of a row's tensors or files.
    `rows` is the number of rows, or None. `file_bytes` is the disk space of all other files. `plan` says in words how
    the stage computes. If `peak` is too large, `remedy` names settings that would fit, or is "".
    """

    peak: int
    row_bytes: int = 0
    rows: int | None = None
    file_bytes: int = 0
    plan: str = ""
    remedy: str = ""
