"""The answer of an SQL query as text: an aligned table, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from pipeline.terminal import format_cell, format_table

ROWS_SHOWN = 1000  # rows of an answer printed as a table; csv and json have all rows
CELL_WIDTH = 80  # characters; longer text is cut in a table, a sha256 (64) is not
STYLES = ("table", "csv", "json")


def format_answer(names: Sequence[str], rows: Sequence[tuple[Any, ...]], style: str) -> str:
    if style == "csv":
        return csv_text(names, rows)
    if style == "json":
        return json_text(names, rows)
    table = format_table(names, [[_short(value) for value in row] for row in rows[:ROWS_SHOWN]], null="NULL")
    left = len(rows) - ROWS_SHOWN
    return f"{table}\n... and {left} more rows; --format csv or json has all" if left > 0 else table


def csv_text(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([json.dumps(v, default=str) if isinstance(v, list | dict) else v for v in row] for row in rows)
    return text.getvalue().removesuffix("\n")


def json_text(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> str:
    """A JSON array, one object per line; NaN and infinity, which JSON lacks, become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, float | Decimal):
            return float(value) if math.isfinite(value) else None
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    lines = [json.dumps({n: plain(v) for n, v in zip(names, row, strict=True)}, ensure_ascii=False, default=str) for row in rows]
    return "[\n" + ",\n".join(lines) + "\n]" if lines else "[]"


def _short(value: Any) -> Any:
    if value is None or isinstance(value, int | float | Decimal):
        return value
    text = format_cell(value)
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 1] + "…"
