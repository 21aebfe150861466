"""How the answer to a query is shown and written: as a table, CSV, JSON or Parquet."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.commands.query import run_query, write_answer
from pipeline.commands.query_text import CELL_WIDTH, ROWS_SHOWN
from tests.pipeline.commands import tables
from tests.pipeline.commands.tables import FakeProject


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> FakeProject:
    return tables.make(tmp_path_factory.mktemp("project"))


def test_a_printed_table_is_aligned_and_long_text_and_many_rows_are_cut(project: FakeProject) -> None:
    text = run_query(project, "select path, width, rejected from images order by path limit 3")
    assert text.splitlines() == [
        "path           width  rejected",
        "a.jpg            640  NULL",
        "broken.jpg       640  truncated",
        "copy-of-a.jpg    640  duplicate",
    ]
    lines = run_query(project, "select text, 1 as n from captions where text like '猫%'").splitlines()
    assert lines == ["text          n", "猫 on a sofa  1"]
    assert max(map(len, run_query(project, "select repeat('x', 500)").splitlines())) < CELL_WIDTH + 20
    many = run_query(project, f"from range({ROWS_SHOWN + 7})").splitlines()
    assert len(many) == ROWS_SHOWN + 2 and "7 more rows" in many[-1]
    assert run_query(project, "select path from images where false").splitlines() == ["path"]


def test_csv_and_json_hold_every_row_and_value(project: FakeProject) -> None:
    sql = "select text, position, [1, 2] as pair, 1/3 as third, 'nan'::float as bad, null as none from captions order by text"
    rows = list(csv.DictReader(run_query(project, sql, "csv").splitlines(keepends=True)))
    assert [row["text"] for row in rows][-1] == "猫 on a\nsofa" and rows[0]["pair"] == "[1, 2]" and rows[0]["none"] == ""
    found = json.loads(run_query(project, sql, "json"))
    assert len(found) == len(rows) == 7 and found[-1]["text"] == "猫 on a\nsofa"
    assert found[0]["pair"] == [1, 2] and found[0]["bad"] is None and found[0]["third"] == 1 / 3
    assert json.loads(run_query(project, "select 1 where false", "json")) == []


@pytest.mark.parametrize("count", [0, 3, 25_000])
def test_an_answer_is_written_whole_to_csv_json_and_parquet(project: FakeProject, tmp_path: Path, count: int) -> None:
    sql = f"select range as n, 'a, \"b\"' as text, [range] as list from range({count})"
    for kind in ("csv", "json", "parquet"):
        assert write_answer(project, sql, tmp_path / "new" / f"a.{kind}", kind) == count
    rows = json.loads((tmp_path / "new" / "a.json").read_text())
    assert [row["n"] for row in rows] == list(range(count)) and all(row["text"] == 'a, "b"' for row in rows)
    with (tmp_path / "new" / "a.csv").open(newline="") as file:
        assert [int(row["n"]) for row in csv.DictReader(file)] == list(range(count))
    assert pq.read_table(tmp_path / "new" / "a.parquet")["n"].to_pylist() == list(range(count))


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
@pytest.mark.parametrize("sql", ["", "-- nothing"])
def test_an_answer_to_sql_without_rows_is_refused_in_one_line(project: FakeProject, tmp_path: Path, sql: str, kind: str) -> None:
    with pytest.raises(ValueError, match="for instance: select") as caught:
        write_answer(project, sql, tmp_path / "a", kind)
    assert "\n" not in str(caught.value) and not list(tmp_path.glob("*a*"))


def test_a_failed_answer_leaves_no_file(project: FakeProject, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Conversion Error"):
        write_answer(
            project, "select (case when range > 20000 then 'x' else '1' end)::int from range(30000)", tmp_path / "a", "csv"
        )
    assert list(tmp_path.glob("*a*")) == []
