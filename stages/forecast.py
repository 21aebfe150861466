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
    """What the needs of a stage are forecast from."""

    sections: Mapping[str, Any]  # section of project.toml -> its settings
    family: Any  # the record of the model family, or None
    budget: int  # bytes that the stage may take
    weights: Callable[[str], Path | None] = lambda name: None  # of a component; None: not on this machine
    rows: Callable[[TableSchema], pa.Table | None] = lambda schema: None  # of a table; None: it is not built


@dataclass(frozen=True)
class Forecast:
    """What a stage needs, in bytes."""

    peak: int  # memory of MLX and of large arrays; 0: little
    row_bytes: int = 0  # on disk, mean of a row's tensors or files
    rows: int | None = None
    file_bytes: int = 0  # on disk, all other files
    plan: str = ""  # for the user: how the stage computes
    remedy: str = ""  # for the user: settings that would fit, if `peak` does not
