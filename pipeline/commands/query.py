"""Ask the tables in SQL: a DuckDB catalog in memory in which every table of a project bears its stage_name.

    from pipeline.query import open_catalog
    open_catalog("data/cats").sql("select path, rejected from images where rejected is not null")

Beside the tables: `tables` (what is built, how large), `columns` (what every column holds), `unused` (images that are not
trained on, and why), and the macro bf16(word), the value of a stored 16-bit word.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    import duckdb

    from pipeline.project.project import Project

ROWS_SHOWN = 1000  # of a result printed as a table; csv and json print all
CELL_WIDTH = 80  # characters; longer text is cut in a table, a sha256 (64) is not
STYLES = ("table", "csv", "json")

# The value of a bfloat16 word: sign, 8 bits of exponent, 7 of fraction. Denormals count as zero.
BF16 = """
create or replace temp macro bf16(u) as (case
    when (u & 32767) = 0 or ((u >> 7) & 255) = 0 then 0.0
    when ((u >> 7) & 255) = 255 and (u & 127) > 0 then 'nan'::float
    when ((u >> 7) & 255) = 255 then (case when u >= 32768 then '-inf' else 'inf' end)::float
    else (1 - 2 * (u >> 15)::int) * pow(2.0, ((u >> 7) & 255)::int - 127) * (1 + (u & 127) / 128.0) end)::float
"""

# An image counts as unused once, at the first table where it drops out. A bucket or crop of it that is rejected while
# another is trained does not make it unused.
UNUSED = """
create or replace temp view unused as
with usable as (select path, image_id from images where rejected is null),
dropped(place, stage_name, image_id, reason) as (
    select 2, 'captions', image_id, 'no caption' from usable
    where (select built from tables where stage_name = 'captions')
      and image_id not in (select image_id from captions where role = 'caption')
    union all
    select 3, 'buckets', image_id, string_agg(distinct rejected, ', ' order by rejected) from buckets
    group by image_id having bool_and(rejected is not null)
    union all
    select 4, 'latents', image_id, string_agg(distinct rejected, ', ' order by rejected) from latents
    group by image_id having bool_and(rejected is not null)
)
select path, image_id, 'images' as stage_name, rejected || case when detail = '' then '' else ': ' || detail end as reason
from images where rejected is not null
union all
select path, image_id, arg_min(stage_name, place), arg_min(reason, place)
from usable join dropped using (image_id) group by path, image_id
order by stage_name, path
"""


def open_catalog(project: Project | Path | str, connection: duckdb.DuckDBPyConnection | None = None) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection that knows a project's tables by their stage_names: live rows of the current recipe, in memory.

    A table that is not built yet is there with its columns and no rows. `project`: its folder, or an open Project.
    """
    import duckdb

    from pipeline.project.project import Project

    opened = Project(project) if isinstance(project, str | Path) else project
    catalog = connection or duckdb.connect(config={"autoinstall_known_extensions": "false"})  # offline: a typo fetches nothing
    for stage_name in opened.stage_names:
        folder = opened.folder(stage_name)
        catalog.register(
            stage_name, folder.rows() if folder.has_current_columns else opened.stage(stage_name).writes.stored.empty_table()
        )
    catalog.register("tables", _tables(opened))
    catalog.register("columns", _columns(opened))
    catalog.execute(BF16)
    if set(opened.stage_names) >= {"images", "captions", "buckets", "latents"}:
        catalog.execute(UNUSED)
    return catalog


def answer(project: Project, sql: str) -> pa.Table:
    """The result of an SQL query over the tables of a project. ValueError, in one line, for a mistake in the SQL."""
    import duckdb

    catalog = open_catalog(project)
    catalog.execute("set python_enable_replacements = false")  # a misspelt table must not find one of our variables
    try:
        result = catalog.sql(sql)
        if result is None:
            raise ValueError("the SQL returns no rows; for instance: select * from tables")
        return result.arrow() if not hasattr(result, "to_arrow_table") else result.to_arrow_table()
    except duckdb.Error as error:
        raise ValueError(_clear(error, sql, catalog)) from None


def run_query(project: Project | Path | str, sql: str, style: str = "table") -> str:
    """The answer to one question, as an aligned table, csv or json. A mistake in the SQL is one line with the names there are."""
    import duckdb

    if style not in STYLES:
        raise ValueError(f"unknown style {style!r}; there are {', '.join(STYLES)}")
    catalog = open_catalog(project)
    catalog.execute("set python_enable_replacements = false")  # else a misspelt table may be one of our variables
    try:
        result = catalog.execute(sql)
        if not result or not result.description:
            raise ValueError("the SQL is empty; for instance: select * from tables")
        names, rows = [column[0] for column in result.description], result.fetchall()
    except duckdb.Error as error:
        raise ValueError(_clear(error, sql, catalog)) from None
    if style == "csv":
        return _csv(names, rows)
    return _json(names, rows) if style == "json" else _aligned(names, rows)


def export_parquet(project: Project | Path | str, out: Path) -> list[Path]:
    """Every table as `<stage_name>.parquet`, and all of them in `catalog.duckdb`, for programs that read no Lance.

    The catalog is in the format of DuckDB 1.0, which all later versions read. Files of an earlier export are replaced.
    """
    catalog = open_catalog(project)
    names = [
        *(str(stage_name) for (stage_name,) in catalog.execute("select stage_name from tables").fetchall()),
        "tables",
        "columns",
    ]
    out.mkdir(parents=True, exist_ok=True)
    temporaries = {out / f"{name}.parquet": out / f".tmp-{os.getpid()}-{name}.parquet" for name in names}
    temporaries[out / "catalog.duckdb"] = file = out / f".tmp-{os.getpid()}-catalog.duckdb"
    try:
        catalog.execute(f"attach {_quoted(file)} as exported (storage_version 'v1.0.0')")
        for name in names:
            catalog.execute(f"copy (from {name}) to {_quoted(temporaries[out / f'{name}.parquet'])} (format parquet)")
            catalog.execute(f"create table exported.{name} as from {name}")
        catalog.execute("detach exported")
        for path, temporary in temporaries.items():
            temporary.replace(path)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)
    return list(temporaries)


def _tables(project: Project) -> pa.Table:
    """One row per stage_name: which recipe is shown, how much it holds, what it is."""
    rows = []
    for stage_name in project.stage_names:
        folder = project.folder(stage_name)
        built = folder.has_current_columns
        usage = folder.usage() if built else {"rows": 0, "dead": 0, "bytes": 0}
        recipe, doc = folder.folder.name if built else None, project.stage(stage_name).writes.doc
        rows.append((stage_name, built, recipe, usage["rows"], usage["dead"], usage["bytes"], str(folder.folder), doc))
    names = ("stage_name", "built", "recipe", "rows", "dead", "bytes", "folder", "doc")
    kinds = (pa.string(), pa.bool_(), pa.string(), pa.int64(), pa.int64(), pa.int64(), pa.string(), pa.string())
    return _arrow(rows, names, kinds)


def _columns(project: Project) -> pa.Table:
    """One row per column of every table."""
    rows = []
    for stage_name in project.stage_names:
        schema = project.stage(stage_name).writes
        for field in schema.stored:
            doc = (field.metadata or {}).get(b"doc", b"").decode()
            rows.append((stage_name, field.name, str(field.type), field.name in schema.key, doc))
    names, kinds = ("stage_name", "name", "type", "key", "doc"), (pa.string(), pa.string(), pa.string(), pa.bool_(), pa.string())
    return _arrow(rows, names, kinds)


def _arrow(rows: list[tuple[Any, ...]], names: tuple[str, ...], kinds: tuple[pa.DataType, ...]) -> pa.Table:
    schema = pa.schema(list(zip(names, kinds, strict=True)))
    return pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], schema=schema)


def _clear(error: Exception, sql: str, catalog: duckdb.DuckDBPyConnection) -> str:
    """DuckDB's message in one line, without its drawing, and with the tables or columns that exist."""
    said = " ".join(re.split(r"\n+\s*(?:LINE \d+:|Candidate functions)", str(error))[0].split())
    if "Table with name" in said:
        stage_names = [str(stage_name) for (stage_name,) in catalog.execute("select stage_name from tables").fetchall()]
        return f"{said} There are {', '.join([*stage_names, 'tables', 'columns', 'unused'])}."
    if re.search(r"column.*(not found|does not exist|FROM clause)|not have a column", said, re.IGNORECASE):
        for stage_name, names in catalog.execute(
            "select stage_name, string_agg(name, ', ') from columns group by stage_name order by stage_name"
        ).fetchall():
            if re.search(rf"\b{stage_name}\b", sql, re.IGNORECASE):
                said += f" {stage_name} has {names}."
    return said


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


def _csv(names: list[str], rows: list[tuple[Any, ...]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([json.dumps(v, default=str) if isinstance(v, list | dict) else v for v in row] for row in rows)
    return text.getvalue().removesuffix("\n")


def _json(names: list[str], rows: list[tuple[Any, ...]]) -> str:
    """A JSON array, one row a line; a value that JSON cannot hold (NaN, infinity) is null."""

    def plain(value: Any) -> Any:
        if isinstance(value, float | Decimal):
            return float(value) if math.isfinite(value) else None
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    lines = [json.dumps({n: plain(v) for n, v in zip(names, row, strict=True)}, ensure_ascii=False, default=str) for row in rows]
    return "[\n" + ",\n".join(lines) + "\n]" if lines else "[]"


def _aligned(names: list[str], rows: list[tuple[Any, ...]]) -> str:
    """Columns side by side, numbers to the right; wide (Asian) characters count twice."""
    from rich.cells import cell_len, set_cell_size

    cells = [[_cell(value) for value in row] for row in rows[:ROWS_SHOWN]]
    widths = [max(cell_len(name), *(cell_len(row[i]) for row in cells), 0) for i, name in enumerate(names)]
    right = [all(isinstance(row[i], int | float | Decimal | None) for row in rows) for i in range(len(names))]

    def line(values: Sequence[str]) -> str:
        padded = [v if cell_len(v) > w else set_cell_size(v, w) for v, w in zip(values, widths, strict=True)]
        return "  ".join(v.rstrip().rjust(w) if r else v for v, w, r in zip(padded, widths, right, strict=True)).rstrip()

    lines = [line(names), "  ".join("-" * w for w in widths), *(line(row) for row in cells)]
    left = len(rows) - len(cells)
    return "\n".join([*lines, f"... and {left} more rows; csv and json give all"] if left else lines)


def _cell(value: Any) -> str:
    """A value in few characters, on one line."""
    if value is None:
        return "NULL"
    text = f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 1] + "…"
