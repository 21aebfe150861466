"""What a query may not do: reach files, run without end, take all memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.commands.query import answer, open_catalog, run_query
from pipeline.commands.query_limits import Limits
from tests.pipeline.commands import tables
from tests.pipeline.commands.tables import FakeProject


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> FakeProject:
    return tables.make(tmp_path_factory.mktemp("project"))


def ask(project: FakeProject, sql: str) -> list[tuple[object, ...]]:
    return open_catalog(project).execute(sql).fetchall()


@pytest.mark.parametrize(
    "sql",
    [
        "copy images to '{file}'",
        "attach '{file}' as x",
        "select * from read_csv('/etc/passwd')",
        "select * from read_text('/etc/passwd')",
        "from '/etc/passwd'",
        "select * from glob('/*')",
        "install httpfs",
        "load httpfs",
        "export database '{file}'",
        "set enable_external_access = true",
        "set memory_limit = '8GB'",
        "set temp_directory = '/tmp'",
        "pragma profiling_output = '{file}'",
        "select 1; copy images to '{file}'",
    ],
)
def test_a_query_reaches_no_file_and_no_extension(project: FakeProject, tmp_path: Path, sql: str) -> None:
    file = tmp_path / "written"
    for ask in (run_query, answer):
        with pytest.raises(ValueError) as error:
            ask(project, sql.replace("{file}", str(file)))
        assert "\n" not in str(error.value) and not file.exists()


def test_an_unsafe_query_may_write_a_file(project: FakeProject, tmp_path: Path) -> None:
    run_query(project, f"copy images to '{tmp_path}/written.csv'", limits=Limits(unsafe=True))
    assert (tmp_path / "written.csv").read_text().startswith("path,")


@pytest.mark.parametrize(
    "sql",
    [
        "with recursive x as (select 1 as n union all select n + 1 from x) select count(*) from x",
        "select count(*) from range(1000000000000) a, range(1000000) b",
    ],
)
def test_a_query_without_an_end_is_ended(project: FakeProject, sql: str) -> None:
    with pytest.raises(ValueError, match=r"^the query took longer than 0\.2 s; --seconds allows more$"):
        run_query(project, sql, limits=Limits(seconds=0.2, gigabytes=8))


def test_a_query_that_needs_too_much_memory_is_one_line(project: FakeProject) -> None:
    with pytest.raises(ValueError, match=r"^the query needs more than 0\.1 GB; --memory-gb allows more$"):
        run_query(project, "select string_agg(repeat('x', 1000000)) from range(1000)", limits=Limits(gigabytes=0.1))
    with pytest.raises(ValueError, match="the answer has more than 1,000,000 rows: add a limit, or write it"):
        run_query(project, "from range(100000000)")


def test_bytes_that_are_not_utf_8_are_one_line(project: FakeProject) -> None:
    with pytest.raises(ValueError, match="the SQL must be UTF-8 text"):
        run_query(project, b"select '\xff'".decode("utf-8", "surrogateescape"))
