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
    """The tables and views of a project as they were when it was opened."""

    def __init__(self, project: Project) -> None:
        self.connection: duckdb.DuckDBPyConnection = open_catalog(project)

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def rows(self, sql: str, most: int | None = None, **values: Any) -> list[Row]:
        """`values` are the parameters of the query: `step=5` sets `$step`."""
        result = self.connection.execute(sql, values or None)
        names = [column[0] for column in result.description]
        found = result.fetchall() if most is None else result.fetchmany(most)
        return [dict(zip(names, row, strict=True)) for row in found]


@contextmanager
def errors_as_text(into: Row) -> Iterator[None]:
    """Errors of DuckDB and ValueErrors of the block become `into["error"]`, one line."""
    import duckdb

    try:
        yield
    except (duckdb.Error, ValueError) as error:
        into["error"] = " ".join(str(error).split())


def page_number(chosen: Mapping[str, str], rows: int) -> tuple[int, int]:
    """(page from 0, pages): the chosen page, or the nearest that exists."""
    pages = max(1, -(-rows // PER_PAGE))
    wanted = chosen.get("page", "0")
    return min(int(wanted) if wanted.isdecimal() and len(wanted) < 9 else 0, pages - 1), pages
