"""The database behind the page: queries whose rows are dicts, and how rows are divided into pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipeline.commands.query import open_catalog

if TYPE_CHECKING:
    import duckdb

    from pipeline.project.project import Project

PER_PAGE = 60  # cards and texts on one page

Row = dict[str, Any]


class Catalog:
    """A database with the tables and views of `project`. Call `rows(sql)` to run a query. The tables are read when the
    object is created. A `with` statement closes the database at its end.
    """

    def __init__(self, project: Project) -> None:
        self.connection: duckdb.DuckDBPyConnection = open_catalog(project)

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def rows(self, sql: str, most: int | None = None, **values: Any) -> list[Row]:
        """Run the query `sql` and return its rows as dicts. `most` is the largest number of rows to return. If it is
        None, all rows are returned. Further keyword arguments are the parameters of the query: `step=5` sets `$step`.
        """
        result = self.connection.execute(sql, values or None)
        names = [column[0] for column in result.description]
        found = result.fetchall() if most is None else result.fetchmany(most)
        return [dict(zip(names, row, strict=True)) for row in found]


@contextmanager
def errors_as_text(into: Row) -> Iterator[None]:
    """Catch an error in the body of a `with` statement and store its message as `into["error"]`. The message is one
    line. Only `ValueError` and errors of DuckDB are caught.
    """
    import duckdb

    try:
        yield
    except (duckdb.Error, ValueError) as error:
        into["error"] = " ".join(str(error).split())


def page_number(chosen: Mapping[str, str], rows: int) -> tuple[int, int]:
    """Return (page, pages): the number of the page to show, from 0, and the number of pages. `chosen` holds what the
    user chose. Its entry "page" is the wanted page, as text. The result is always a page that exists. `rows` is the
    number of rows on all pages together.
    """
    pages = max(1, -(-rows // PER_PAGE))
    wanted = chosen.get("page", "0")
    return min(int(wanted) if wanted.isdecimal() and len(wanted) < 9 else 0, pages - 1), pages
