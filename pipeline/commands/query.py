"""`latentmill query`: answers SQL queries over the tables of a project."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands.query_limits import USUAL, Limits, limited
from pipeline.commands.query_text import STYLES, csv_text, format_answer, json_text
from pipeline.commands.runs import rows_of_runs, runs_table
from pipeline.options import with_project
from pipeline.store.disk import atomic_write

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from pipeline.project.project import Project

MOST_ROWS = 1_000_000  # rows of an answer that are printed
CHUNK = 10_000  # rows in memory at once while an answer is written to a file

# The value of a bfloat16 word: sign, 8 bits of exponent, 7 of fraction. Denormals count as zero.
BF16 = """
create or replace temp macro bf16(u) as (case
    when (u & 32767) = 0 or ((u >> 7) & 255) = 0 then 0.0
    when ((u >> 7) & 255) = 255 and (u & 127) > 0 then 'nan'::float
    when ((u >> 7) & 255) = 255 then (case when u >= 32768 then '-inf' else 'inf' end)::float
    else (1 - 2 * (u >> 15)::int) * pow(2.0, ((u >> 7) & 255)::int - 127) * (1 + (u & 127) / 128.0) end)::float
"""


FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("query")
@click.argument("sql", required=False, envvar="LATENTMILL_SQL")
@click.option("--format", "style", type=click.Choice(STYLES), default="table", show_default=True, help="Format of the answer.")
@click.option("--csv", "csv_file", type=FILE, help="Write the answer to this file, as CSV.")
@click.option("--json", "json_file", type=FILE, help="Write the answer to this file, as a JSON array.")
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
    is printed, or written to a file as CSV, JSON or Parquet. Without --unsafe, the query reads only these tables.
    """
    limits = Limits(seconds, memory_gb, unsafe)
    files = {kind: path for kind, path in (("csv", csv_file), ("json", json_file), ("parquet", parquet)) if path}
    if parquet and not sql:
        export_parquet(project, parquet)
        click.echo(f"wrote {parquet / 'catalog.duckdb'} and a Parquet file per table")
    elif not sql:
        raise ValueError('no SQL given; for instance: latentmill query "select * from tables"')
    elif not files:
        click.echo(run_query(project, sql, style, limits))
    for kind, path in files.items() if sql else ():
        click.echo(f"wrote {write_answer(project, sql or '', path, kind, limits)} rows to {path}")


def open_catalog(project: Project | Path | str, connection: duckdb.DuckDBPyConnection | None = None) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection with every table and view of a project.

    Beside the stages' tables there are `tables` (what is built), `columns` (what each column holds), `runs`, the rows of all
    runs (`all_train`), and the function bf16(word), the value of a stored bfloat16. A table that is not built has columns and
    no rows. Tensors are left out.
    """
    import duckdb

    from pipeline.project.project import Project

    opened = Project(project) if isinstance(project, str | Path) else project
    catalog = connection or duckdb.connect(config={"autoinstall_known_extensions": "false"})  # a typo must not download anything
    for name in opened.stage_names:
        folder = opened.folder(name)
        catalog.register(name, folder.rows() if folder.exists else opened.stage(name).writes.stored.empty_table())
    catalog.register("tables", _tables(opened))
    catalog.register("columns", _columns(opened))
    catalog.register("runs", runs_table(opened))
    for name, rows in rows_of_runs(opened).items():
        catalog.register(name, rows)
    catalog.execute(BF16)
    for name, view in opened.pipeline.views.items():
        catalog.execute(f"create or replace temp view {name} as {view.sql}")
    return catalog


def answer(project: Project, sql: str, limits: Limits = USUAL) -> pa.Table:
    """The rows of a query. Raises NotBuilt if it names a table that is not built, ValueError for any other mistake."""
    with _catalog_for(project, sql, limits) as catalog:
        result: Any = catalog.sql(sql)
        if result is None:
            raise ValueError("the SQL returns no rows; for instance: select * from tables")
        table: pa.Table = result.to_arrow_table()
    return table


def run_query(project: Project, sql: str, style: str = "table", limits: Limits = USUAL) -> str:
    """The rows of a query as text, at most `MOST_ROWS`; raises as `answer` does. `style` is one of `STYLES`."""
    if style not in STYLES:
        raise ValueError(f"the style must be one of {', '.join(STYLES)}, got {style!r}")
    with _catalog_for(project, sql, limits) as catalog:
        names = _begin(catalog, sql)
        rows = catalog.fetchmany(MOST_ROWS + 1)
        if len(rows) > MOST_ROWS:
            raise ValueError(f"the answer has more than {MOST_ROWS:,} rows: add a limit, or write it to a file with --csv FILE")
        return format_answer(names, rows, style)


def write_answer(project: Project, sql: str, path: Path, kind: str, limits: Limits = USUAL) -> int:
    """Write the rows of a query to a file, of any number, whole or not at all, and return their number. Raises as `answer` does.

    `kind` is "csv", "json" or "parquet".
    """
    import pyarrow.parquet as pq

    count = 0
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    with _catalog_for(project, sql, limits) as catalog, atomic_write(path.absolute()) as temporary:
        if kind == "parquet":
            relation = catalog.sql(sql)
            if relation is None:  # empty SQL, or a statement that has no rows
                raise ValueError("the SQL gives no rows to write; for instance: select * from tables")
            reader: Any = relation.to_arrow_reader(CHUNK)
            with pq.ParquetWriter(temporary, reader.schema) as writer:
                for batch in reader:
                    writer.write_batch(batch)
                    count += batch.num_rows
            return count
        names = _begin(catalog, sql)
        with temporary.open("w", encoding="utf-8") as file:
            file.write("[" if kind == "json" else csv_text(names, []))
            while rows := catalog.fetchmany(CHUNK):
                # Later chunks without the header line, or without the brackets around a JSON array.
                text = csv_text(names, rows).partition("\n")[2] if kind == "csv" else json_text(names, rows)[2:-2]
                file.write(("," if kind == "json" and count else "") + "\n" + text)
                count += len(rows)
            file.write("\n]\n" if kind == "json" else "\n")
    return count


def _begin(catalog: duckdb.DuckDBPyConnection, sql: str) -> list[str]:
    result = catalog.execute(sql)
    if not result or not result.description:
        raise ValueError("the SQL is empty; for instance: select * from tables")
    return [column[0] for column in result.description]


@contextmanager
def _catalog_for(project: Project, sql: str, limits: Limits) -> Iterator[duckdb.DuckDBPyConnection]:
    """The catalog within the limits; DuckDB's errors become a ValueError of one line. Raises NotBuilt if `sql` needs a table."""
    import duckdb

    from pipeline.errors import NotBuilt

    try:
        sql.encode()
    except UnicodeEncodeError:
        raise ValueError("the SQL must be UTF-8 text, got bytes that are not") from None
    catalog = open_catalog(project)
    for name in _not_built(project, sql, catalog):
        raise NotBuilt(f"the table {name} is not built; run: make {name}", name)
    try:
        with limited(catalog, limits):
            yield catalog
    except duckdb.Error as error:
        raise ValueError(_explain(error, sql, catalog)) from None


def _not_built(project: Project, sql: str, catalog: duckdb.DuckDBPyConnection) -> Iterator[str]:
    """Tables that the query names, itself or through a view, and that are not built."""
    (tree,) = catalog.execute("select json_serialize_sql($1)", [sql]).fetchall()[0]
    words = re.findall(r'"table_name":"(\w+)"', tree) if '"error":false' in tree else re.findall(r"\w+", sql)
    named = {word.lower() for word in words}  # only a SELECT can be parsed; of other statements every word counts
    named.update(*(view.needs for name, view in project.pipeline.views.items() if name in named))
    for (name,) in catalog.execute("select stage from tables where not built").fetchall():
        if name in named:
            yield name


def export_parquet(project: Project, out: Path) -> list[Path]:
    """Write every table as a Parquet file, and a DuckDB database with all of them; files of an earlier export are replaced."""
    catalog = open_catalog(project)
    names = [*project.stage_names, *project.pipeline.tables, "tables", "columns"]
    out.mkdir(parents=True, exist_ok=True)
    temporaries = {out / f"{name}.parquet": out / f".tmp-{os.getpid()}-{name}.parquet" for name in names}
    temporaries[out / "catalog.duckdb"] = file = out / f".tmp-{os.getpid()}-catalog.duckdb"
    try:
        # Every DuckDB from 1.0 on reads this format.
        catalog.execute(f"attach {_quoted(file)} as exported (storage_version 'v1.0.0')")
        for name in names:
            catalog.execute(f"copy (from {name}) to {_quoted(temporaries[out / f'{name}.parquet'])} (format parquet)")
            catalog.execute(f"create table exported.{name} as from {name}")
        catalog.execute("detach exported")
        # Files get their names only when all are written.
        for path, temporary in temporaries.items():
            temporary.replace(path)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)
    return list(temporaries)


def _tables(project: Project) -> pa.Table:
    import pyarrow as pa

    rows = []
    for name in project.stage_names:
        folder, doc = project.folder(name), project.stage(name).writes.doc
        built = folder.exists
        usage = folder.usage() if built else {"rows": 0, "dead": 0, "bytes": 0}
        rows.append({"stage": name, "built": built, "recipe": folder.folder.name if built else None, "doc": doc})
        rows[-1] |= {key: usage[key] for key in ("rows", "dead", "bytes")} | {"folder": str(folder.folder)}
    kinds = {"stage": pa.string(), "built": pa.bool_(), "recipe": pa.string(), "rows": pa.int64(), "dead": pa.int64()}
    kinds |= {"bytes": pa.int64(), "folder": pa.string(), "doc": pa.string()}
    return pa.Table.from_pylist(rows, schema=pa.schema(kinds))


def _columns(project: Project) -> pa.Table:
    import pyarrow as pa

    rows = []
    for name in project.stage_names:
        schema = project.stage(name).writes
        for field in schema.stored:
            doc = (field.metadata or {}).get(b"doc", b"").decode()
            rows.append({"stage": name, "name": field.name, "type": str(field.type), "key": field.name in schema.key, "doc": doc})
    kinds = {"stage": pa.string(), "name": pa.string(), "type": pa.string(), "key": pa.bool_(), "doc": pa.string()}
    return pa.Table.from_pylist(rows, schema=pa.schema(kinds))


def _explain(error: Exception, sql: str, catalog: duckdb.DuckDBPyConnection) -> str:
    """DuckDB's message on one line, with the tables or columns that exist if one is unknown."""
    message = " ".join(re.split(r"\n+\s*(?:LINE \d+:|Candidate functions)", str(error))[0].split())
    if "Table with name" in message:
        views = "select view_name from duckdb_views() where temporary and not internal order by 1"
        found = catalog.execute(f"select stage from tables union all ({views})").fetchall()
        names = dict.fromkeys(str(name) for (name,) in found)
        return f"{message} There are {', '.join(names)}."
    if re.search(r"column.*(not found|does not exist|FROM clause)|not have a column", message, re.IGNORECASE):
        for name, columns in catalog.execute(
            "select stage, string_agg(name, ', ') from columns group by stage order by stage"
        ).fetchall():
            if re.search(rf"\b{name}\b", sql, re.IGNORECASE):
                message += f" {name} has {columns}."
    return message


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"
