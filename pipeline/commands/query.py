"""`latentmill query` and `panel`: answer SQL queries over the tables of a project, those of the user and stored ones."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands.catalog import open_catalog
from pipeline.options import JSON, with_project
from pipeline.project.runs import trains
from pipeline.store.disk import atomic_write
from pipeline.terminal import format_cell, format_table, give, tell
from stages.settings import nearest

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from pipeline.project.project import Project

MOST_ROWS = 1_000_000  # rows of an answer that are printed
MOST_VALUES = 20_000_000  # values in lists and texts of such rows: about 1 GB
CHUNK = 10_000  # rows in memory at once while an answer is written to a file
ROWS_SHOWN = 1000  # rows of an answer printed as a table; csv and json have all rows
CELL_WIDTH = 80  # characters; longer text is cut in a table, a sha256 (64) is not
POLL_SECONDS = 0.1  # between two interrupts of a query that is over
STYLES = ("table", "csv", "json")
# What keeps a query from files, from extensions, and from undoing that. An answer too large for the memory is an error.
LOCKED = (
    ("temp_directory", "''"),
    ("enable_external_access", "false"),
    ("autoload_known_extensions", "false"),
    ("lock_configuration", "true"),
)


@dataclass(frozen=True)
class Limits:
    seconds: float = 300.0
    gigabytes: float = 4.0  # DuckDB's memory
    unsafe: bool = False  # may read and write files, attach databases and load extensions


USUAL = Limits()


PRINTED = "-"  # of --json without a file
FILE = click.Path(path_type=Path, dir_okay=False)
FORMAT = click.option(
    "--format", "style", type=click.Choice(STYLES), default="table", show_default=True, help="Format of the answer."
)


@click.command("query")
@click.argument("sql", required=False)
@FORMAT
@click.option("--csv", "csv_file", type=FILE, help="Write the answer to this file, as CSV.")
@click.option(
    "--json",
    "json_file",
    type=FILE,
    is_flag=False,
    flag_value=PRINTED,
    help="Write the answer to this file, as a JSON array; without a file, print it.",
)
@click.option(
    "--parquet",
    type=click.Path(path_type=Path),
    help="Write the answer to this file, as Parquet. Without SQL: write every table to this folder as a Parquet file, with a "
    "database for DuckDB's own shell.",
)
@click.option(
    "--seconds", type=click.FloatRange(0.001, 1e6), default=Limits.seconds, show_default=True, help="A longer query is ended."
)
@click.option(
    "--memory-gb", type=click.FloatRange(0.1, 1e5), default=Limits.gigabytes, show_default=True, help="Memory for the query, GB."
)
@click.option("--unsafe", is_flag=True, help="Let the query read and write files, attach databases and load extensions.")
@with_project
def command(
    sql: str | None,
    style: str,
    csv_file: Path | None,
    json_file: Path | None,
    parquet: Path | None,
    seconds: float,
    memory_gb: float,
    unsafe: bool,
    project: Project,
) -> None:
    """Answer an SQL query (DuckDB) over the tables of a project. Every table has the name that `latentmill status`
    shows. `select * from tables` lists the tables, `select * from columns` all columns with a description. The answer
    is printed, or written to a new file as CSV, JSON or Parquet. Without --unsafe, the query reads only these tables.
    The image_id of a text that belongs to no image, and of a file that cannot be read, is NULL.
    """
    if json_file == Path(PRINTED):
        style, json_file = "json", None
    limits = Limits(seconds, memory_gb, unsafe)
    files = {kind: path for kind, path in (("csv", csv_file), ("json", json_file), ("parquet", parquet)) if path}
    for path in files.values():
        if path.exists() and (sql or not path.is_dir()):
            raise ValueError(f"{path} exists; move it away or choose another name")
    if not sql and list(files) != ["parquet"]:
        raise ValueError('no SQL given; for instance: latentmill query "select * from tables"')
    if not sql:
        *_, database = export_parquet(project, files["parquet"])
        tell(f"wrote {database} and a Parquet file per table")
    elif not files:
        say_answer(run_query(project, sql, style, limits), style)
    else:
        for kind, path in files.items():
            tell(f"wrote {write_answer(project, sql, path, kind, limits)} rows to {path}")


@click.command("panel")
@click.argument("name", required=False)
@FORMAT
@JSON
@with_project
def panel_command(name: str | None, style: str, as_json: bool, project: Project) -> None:
    """Show the answer to a stored query of the pipeline. Such a query is called a panel. NAME is the name of the panel,
    such as `loss`. Without NAME, all panels of the project's pipeline are listed.
    """
    style = "json" if as_json else style
    if name:
        say_answer(format_rows(answer_panel(project, name), style), style)
    else:
        tell(format_table(("panel", "shows"), [(panel.name, panel.title) for panel in project.pipeline.panels]))


def answer_panel(project: Project, name: str) -> pa.Table:
    """The rows of a panel. Raises ValueError, with the nearest name, if it does not exist, NotBuilt if it needs a table."""
    panels = {panel.name: panel for panel in project.pipeline.panels}
    if name not in panels:
        raise ValueError(f"there is no panel {name!r}{nearest(name, panels)}; there are {', '.join(panels) or 'none'}")
    return answer(project, panels[name].sql)


# Answers


def answer(project: Project, sql: str, limits: Limits = USUAL) -> pa.Table:
    """The rows of a query. Raises NotBuilt if it names a table that is not built, ValueError for any other mistake."""
    with _catalog_for(project, sql, limits) as catalog:
        table: pa.Table = _relation(catalog, sql).to_arrow_table()
    return table


def run_query(project: Project, sql: str, style: str = "table", limits: Limits = USUAL) -> str:
    """The rows of a query as text, at most `MOST_ROWS`; raises as `answer` does. `style` is one of `STYLES`."""
    with _catalog_for(project, sql, limits) as catalog:
        names = _begin(catalog, sql)
        rows = _fetched(catalog, MOST_ROWS + 1)
        if len(rows) > MOST_ROWS:
            raise ValueError(f"the answer has more than {MOST_ROWS:,} rows: add a limit, or write it to a file with --csv FILE")
        return format_answer(names, rows, style)


def first_rows(
    project: Project,
    sql: str,
    most: int,
    limits: Limits,
    cancelled: threading.Event | None = None,
    tables: Mapping[str, Any] | None = None,
) -> tuple[list[str], list[tuple[Any, ...]], int]:
    """Column names, the first rows, and the number of all, of one query that only reads. Raises as `answer` does; once
    `cancelled` is set, the query ends. `tables`: see `open_catalog`.
    """
    with _catalog_for(project, sql, limits, cancelled, tables) as catalog:
        ((text,),) = catalog.execute("select json_serialize_sql($1)", [sql]).fetchall()
        tree = json.loads(text)
        # json_serialize_sql knows only SELECT statements. A syntax error is left to the query itself.
        if tree.get("error") and tree.get("error_type") == "not implemented":
            raise ValueError("only queries that read are answered here: select ..., with ... select, from ...")
        if len(tree.get("statements", [])) > 1:
            raise ValueError("one query at a time")
        names, rows = _begin(catalog, sql), _fetched(catalog, most + 1)
        if len(rows) <= most:
            return names, rows, len(rows)
        ((count,),) = catalog.execute(f"select count(*) from ({sql.rstrip().rstrip(';')}\n)").fetchall()
        return names, rows[:most], count


def _fetched(catalog: duckdb.DuckDBPyConnection, most: int) -> list[tuple[Any, ...]]:
    """At most so many rows. DuckDB's limit of memory does not cover values of Python: raises ValueError for too many of them."""
    found: list[tuple[Any, ...]] = []
    count, values = 4, 0
    while len(found) < most and (rows := catalog.fetchmany(min(count, most - len(found)))):
        values += sum(_size(value) for row in rows for value in row if isinstance(value, list | dict | str | bytes))
        if values > MOST_VALUES:
            raise ValueError(f"the answer has lists and texts of more than {MOST_VALUES:,} values: choose fewer columns or rows")
        found += rows
        count = min(2 * count, CHUNK)
    return found


def _size(value: Any) -> int:
    """Items of a list, 100 characters of a text for one."""
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value[:1]
        return len(value) * max(1, *map(_size, inner), 1)
    return len(value) // 100 if isinstance(value, str | bytes) else 1


def write_answer(project: Project, sql: str, path: Path, kind: str, limits: Limits = USUAL) -> int:
    """Write the rows of a query to a file, of any number, whole or not at all; returns their number. Raises as `answer` does."""
    import pyarrow.parquet as pq

    count = 0
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    with _catalog_for(project, sql, limits) as catalog, atomic_write(path.absolute()) as temporary:
        if kind == "parquet":
            reader = _relation(catalog, sql).to_arrow_reader(CHUNK)
            with pq.ParquetWriter(temporary, reader.schema) as writer:
                for batch in _batches(reader):
                    writer.write_batch(batch)
                    count += batch.num_rows
            return count
        names = _begin(catalog, sql)
        with temporary.open("w", encoding="utf-8") as file:
            file.write("[" if kind == "json" else csv_text([names]))
            while rows := catalog.fetchmany(CHUNK):
                # A chunk of JSON without the brackets around it.
                text = csv_text(rows) if kind == "csv" else json_text(names, rows)[2:-2]
                file.write(("," if kind == "json" and count else "") + "\n" + text)
                count += len(rows)
            file.write("\n]\n" if kind == "json" else "\n")
    return count


def _batches(reader: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Those of DuckDB, whose errors after the first rows come through Arrow as an OSError."""
    import duckdb

    kinds = {"INTERRUPT": duckdb.InterruptException, "Out of Memory": duckdb.OutOfMemoryException}
    try:
        yield from reader
    except OSError as error:
        raise kinds.get(str(error).partition(" Error:")[0], duckdb.Error)(str(error)) from None


def _relation(catalog: duckdb.DuckDBPyConnection, sql: str) -> Any:
    relation = catalog.sql(sql)
    if relation is None:  # empty SQL, or a statement that has no rows
        raise ValueError("the SQL returns no rows; for instance: select * from tables")
    return relation


def _begin(catalog: duckdb.DuckDBPyConnection, sql: str) -> list[str]:
    result = catalog.execute(sql)
    if not result or not result.description:
        raise ValueError("the SQL is empty; for instance: select * from tables")
    return [column[0] for column in result.description]


@contextmanager
def _catalog_for(
    project: Project,
    sql: str,
    limits: Limits,
    cancelled: threading.Event | None = None,
    tables: Mapping[str, Any] | None = None,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """The catalog within the limits; DuckDB's errors become a ValueError of one line. Raises NotBuilt if `sql` needs a table."""
    import duckdb

    from pipeline.errors import NotBuilt

    try:
        sql.encode()
    except UnicodeEncodeError:
        raise ValueError("the SQL must be UTF-8 text, got bytes that are not") from None
    catalog = open_catalog(project, tables=tables)
    for name in _not_built(project, sql, catalog):
        more = ""
        if trains(project.stage(name).writes):
            ((begun,),) = catalog.execute(f"select count(*) from all_{name}").fetchall()
            more = f"; the {begun} rows that unfinished runs have stored are in all_{name}" if begun else ""
        raise NotBuilt(f"the table {name} is not built; run: make {name}{more}", name)
    try:
        with limited(catalog, limits, cancelled):
            yield catalog
    except duckdb.Error as error:
        raise ValueError(_explain(error, sql, catalog)) from None


def _not_built(project: Project, sql: str, catalog: duckdb.DuckDBPyConnection) -> Iterator[str]:
    (tree,) = catalog.execute("select json_serialize_sql($1)", [sql]).fetchall()[0]
    words = re.findall(r'"table_name":"(\w+)"', tree) if '"error":false' in tree else re.findall(r"\w+", sql)
    named = {word.lower() for word in words}  # only a SELECT can be parsed; of other statements every word counts
    named.update(*(view.needs for name, view in project.pipeline.views.items() if name in named))
    for (name,) in catalog.execute("select stage from tables where not built").fetchall():
        # A command's table has no rows until that command runs.
        if name in named and name in project.stage_names:
            yield name


def export_parquet(project: Project, out: Path) -> list[Path]:
    """Write every table as a Parquet file, and a DuckDB database with all of them; files of an earlier export are replaced.

    Raises ValueError if the folder has such files without the database.
    """
    catalog = open_catalog(project)
    names = [*project.stage_names, *project.pipeline.tables, "tables", "columns"]
    paths = [*(out / f"{name}.parquet" for name in names), out / "catalog.duckdb"]
    if not paths[-1].exists() and (other := next((path for path in paths if path.exists()), None)):
        raise ValueError(f"{other} exists and is not of an earlier export; choose another folder")
    with ExitStack() as stack:  # files get their names only when all are written
        *files, database = (stack.enter_context(atomic_write(path)) for path in paths)
        # Every DuckDB from 1.0 on reads this format.
        catalog.execute(f"attach {_quoted(database)} as exported (storage_version 'v1.0.0')")
        for name, file in zip(names, files, strict=True):
            catalog.execute(f"copy (from {name}) to {_quoted(file)} (format parquet)")
            catalog.execute(f"create table exported.{name} as from {name}")
        catalog.execute("detach exported")
    return paths


def _explain(error: Exception, sql: str, catalog: duckdb.DuckDBPyConnection) -> str:
    message = " ".join(re.split(r"\n+\s*(?:LINE \d+:|Candidate functions)", str(error))[0].split())
    if "Table with name" in message:
        views = "select view_name from duckdb_views() where temporary and not internal order by 1"
        found = catalog.execute(f"select stage from tables union all ({views})").fetchall()
        return f"{message} There are {', '.join(dict.fromkeys(name for (name,) in found))}."
    if re.search(r"column.*(not found|does not exist|FROM clause)|not have a column", message, re.IGNORECASE):
        for name, columns in catalog.execute(
            "select stage, string_agg(name, ', ') from columns group by stage order by stage"
        ).fetchall():
            if re.search(rf"\b{name}\b", sql, re.IGNORECASE):
                message += f" {name} has {columns}."
    return message


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


# What a query may use and reach: time, memory, and only the tables


@contextmanager
def limited(catalog: duckdb.DuckDBPyConnection, limits: Limits, cancelled: threading.Event | None = None) -> Iterator[None]:
    """Limit the queries within; raises ValueError of one line for one that breaks a limit, or once `cancelled` is set."""
    import duckdb

    catalog.execute("set python_enable_replacements = false")  # a misspelt table must not find a Python variable
    catalog.execute(f"set memory_limit = '{limits.gigabytes} GB'")
    # Stays in force after the `with` statement: the last setting locks the others.
    for name, value in () if limits.unsafe else LOCKED:
        catalog.execute(f"set {name} = {value}")
    over, ended = cancelled or threading.Event(), False

    def watch() -> None:
        over.wait(limits.seconds)
        while not ended:  # again: an interrupt before a query begins is lost
            catalog.interrupt()
            time.sleep(POLL_SECONDS)

    # DuckDB has no setting for a time limit.
    watching = threading.Thread(target=watch, name="query", daemon=True)
    watching.start()
    try:
        yield
    except duckdb.InterruptException:
        raise ValueError(f"the query took longer than {limits.seconds:g} s; --seconds allows more") from None
    except duckdb.OutOfMemoryException:
        raise ValueError(f"the query needs more than {limits.gigabytes:g} GB; --memory-gb allows more") from None
    except duckdb.PermissionException as error:
        line = " ".join(str(error).split("LINE 1:")[0].split())
        raise ValueError(f"{line}: a query reads only the tables; --unsafe allows more") from None
    finally:
        ended = True
        over.set()
        # It holds the connection: left to end with the interpreter, it would destroy it there, which aborts the process.
        watching.join()


# Answers as text


def say_answer(text: str, style: str) -> None:
    (tell if style == "table" else give)(text)


def format_answer(names: Sequence[str], rows: Sequence[tuple[Any, ...]], style: str) -> str:
    if style == "csv":
        return csv_text([names, *rows])
    if style == "json":
        return json_text(names, rows)
    table = format_table(names, [[_short(value) for value in row] for row in rows[:ROWS_SHOWN]], null="NULL")
    left = len(rows) - ROWS_SHOWN
    return f"{table}\n... and {left} more rows; --format csv or json has all" if left > 0 else table


def format_rows(rows: pa.Table, style: str) -> str:
    return format_answer(rows.column_names, [tuple(row.values()) for row in rows.to_pylist()], style)


def csv_text(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
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
