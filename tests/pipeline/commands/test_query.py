"""SQL over the tables of a project: the catalog, the limits of a query, and its answer as text or file."""

from __future__ import annotations

import csv
import functools
import json
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from pipeline.commands.catalog import open_catalog
from pipeline.commands.query import ROWS_SHOWN, Limits, answer, export_parquet, run_query, write_answer
from schemas.text_to_image import TRAIN
from stages.text_to_image import PIPELINE
from tests import projects
from tests.pipeline.commands import tables
from tests.pipeline.commands.tables import FakeProject, digest
from tests.toy import project as toy

STAGE_NAMES = tuple(PIPELINE.stages)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> FakeProject:
    return tables.make(tmp_path_factory.mktemp("project"))


@functools.cache
def catalog(path: Path) -> duckdb.DuckDBPyConnection:
    return open_catalog(FakeProject(path))


def ask(project: FakeProject, sql: str) -> list[tuple[object, ...]]:
    return catalog(project.path).execute(sql).fetchall()


def test_every_table_has_its_name_and_shows_live_rows_only(project: FakeProject) -> None:
    counts = {stage_name: ask(project, f"select count(*) from {stage_name}")[0][0] for stage_name in STAGE_NAMES}
    assert [counts[name] for name in ("images", "captions", "buckets", "latents", "train")] == [7, 7, 10, 3, 46]


def test_a_table_that_is_not_built_has_its_columns_and_no_rows(tmp_path: Path) -> None:
    early = tables.make(tmp_path, STAGE_NAMES[:2])
    assert ask(early, "select * from train join buckets using (image_id)") == []
    names = [row[0] for row in ask(early, "describe train")]
    assert names == TRAIN.stored.names
    assert ask(early, "select stage, recipe, rows, bytes from tables where not built limit 1") == [("checks", None, 0, 0)]


def test_unused_names_every_image_that_is_not_trained_once_with_the_first_reason(project: FakeProject, tmp_path: Path) -> None:
    found = {path: (table, reason) for path, table, reason in ask(project, "select path, stage, reason from unused")}
    assert found == {
        "broken.jpg": ("images", "truncated: ends after 99 bytes"),
        "copy-of-a.jpg": ("images", "duplicate: of a.jpg"),
        "mute.png": ("captions", "no caption"),
        "thin.png": ("buckets", "too_small"),
        "late.png": ("latents", "cannot be decoded"),
    }
    assert set(found) | set(tables.TRAINED) == set(tables.IMAGES)
    early = tables.make(tmp_path, ("images",))
    assert {row[0] for row in ask(early, "select stage from unused")} == {"images"}, "captions are not built yet"


def test_a_connection_of_ones_own_gets_the_tables_and_bf16_for_the_value_of_a_stored_word(project: FakeProject) -> None:
    import pyarrow.dataset

    catalog = duckdb.connect()
    for _ in range(2):  # again: the tables as they are now
        assert open_catalog(project, catalog) is catalog
    catalog.register("parts", pyarrow.dataset.dataset(project.folder("latents").shards, format="ipc"))
    sql = "select list_transform(tensor, lambda w: bf16(w)) from parts join latents using (latent_id) where latents.image_id = $1"
    assert catalog.execute(sql, [digest("a.jpg")]).fetchall() == [([1.0, -1.0, 2.0, 0.0],)]
    words = [0x7F80, 0xFF80, 0x4049, 0xC049, 0x0001]
    found = catalog.execute(f"select {', '.join(f'bf16({w})' for w in words)}").fetchall()[0]
    assert found == (float("inf"), float("-inf"), 3.140625, -3.140625, 0.0)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("select * from imags", r'Did you mean "images"\? There are images, captions, .*, scores, .*all_train, .*unused'),
        ("select pth from images", r"pth.* images has path, image_id, .*detail"),
        ("select images.pth from images join buckets using (image_id)", r"buckets has image_id, resolution, .*images has path"),
        ("selec 1", "syntax error"),
        ("", "SQL is empty"),
        (b"select '\xff'".decode("utf-8", "surrogateescape"), "the SQL must be UTF-8 text"),
        ("copy images to '/nonexistent/images.csv'", "a query reads only the tables; --unsafe allows more"),
    ],
)
def test_a_mistake_in_sql_is_one_line_with_the_names_that_exist(project: FakeProject, sql: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        run_query(project, sql)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000 and "LINE" not in str(error.value)


def test_parquet_files_and_a_catalog_hold_every_table(project: FakeProject, tmp_path: Path) -> None:
    out = tmp_path / "it's out"
    for _ in range(2):  # again: replaced
        paths = export_parquet(project, out)
        assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in paths)
    with duckdb.connect(str(out / "catalog.duckdb"), read_only=True) as catalog:
        for stage_name in STAGE_NAMES:
            there = catalog.execute(f"select * from {stage_name} order by all").fetchall()
            assert there == ask(project, f"select * from {stage_name} order by all")
            parquet = str(out / f"{stage_name}.parquet").replace("'", "''")
            assert there == catalog.execute(f"select * from '{parquet}' order by all").fetchall()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT COUNT(*) FROM TRAIN",
        "pivot train on step",
        "select 1; select * from train",
    ],
)
def test_a_table_that_is_not_built_is_named_however_it_is_written(tmp_path: Path, sql: str) -> None:
    with pytest.raises(ValueError, match="the table train is not built; run: make train"):
        run_query(FakeProject(tmp_path), sql)


def test_a_printed_table_says_how_many_rows_it_leaves_out(project: FakeProject) -> None:
    many = run_query(project, f"from range({ROWS_SHOWN + 7})").splitlines()
    assert len(many) == ROWS_SHOWN + 2 and "7 more rows" in many[-1]


def test_csv_and_json_hold_every_row_and_value(project: FakeProject) -> None:
    sql = "select text, position, [1, 2] as pair, 1/3 as third, 'nan'::float as bad, null as none from captions order by text"
    rows = list(csv.DictReader(run_query(project, sql, "csv").splitlines(keepends=True)))
    assert [row["text"] for row in rows][-1] == "猫 on a\nsofa" and rows[0]["pair"] == "[1, 2]" and rows[0]["none"] == ""
    found = json.loads(run_query(project, sql, "json"))
    assert len(found) == len(rows) == 7 and found[-1]["text"] == "猫 on a\nsofa"
    assert found[0]["pair"] == [1, 2] and found[0]["bad"] is None and found[0]["third"] == 1 / 3
    assert json.loads(run_query(project, "select 1 where false", "json")) == []


@pytest.mark.parametrize("count", [0, 25_000])
def test_an_answer_is_written_whole_to_csv_json_and_parquet(project: FakeProject, tmp_path: Path, count: int) -> None:
    sql = f"""select range as n, 'a, "b"' as "a\nline, and ""quotes""\", [range] as list from range({count})"""
    for kind in ("csv", "json", "parquet"):
        assert write_answer(project, sql, tmp_path / "new" / f"a.{kind}", kind) == count
    rows = json.loads((tmp_path / "new" / "a.json").read_text())
    assert [row["n"] for row in rows] == list(range(count)) and all('a, "b"' in row.values() for row in rows)
    with (tmp_path / "new" / "a.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        assert [int(row["n"]) for row in reader] == list(range(count))
        assert reader.fieldnames == ["n", 'a\nline, and "quotes"', "list"]
    assert pq.read_table(tmp_path / "new" / "a.parquet")["n"].to_pylist() == list(range(count))


EMPTY = [(kind, "-- nothing", "for instance: select") for kind in ("csv", "json", "parquet")]
LATE = "select (case when range > 20000 then 'x' else '1' end)::int from range(30000)"


ENDLESS = "select a.range, b.range from range(1000000) a, range(1000000) b"
LONG = [(kind, ENDLESS, "the query took longer than 0.3 s; --seconds allows more") for kind in ("csv", "parquet")]
FAILING = [*EMPTY, *((kind, LATE, "Conversion Error") for kind in ("csv", "json", "parquet")), *LONG]


@pytest.mark.parametrize(("kind", "sql", "said"), FAILING)
def test_an_answer_that_fails_or_has_no_rows_is_one_line_and_no_file(project, tmp_path, kind: str, sql: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        write_answer(project, sql, tmp_path / "a", kind, Limits(seconds=0.3 if sql == ENDLESS else 60))
    assert "\n" not in str(caught.value) and not list(tmp_path.glob("*a*"))


def test_a_text_of_no_image_joins_no_unreadable_file(project: FakeProject, tmp_path: Path) -> None:
    assert ask(project, "select count(*), count(image_id), count(caption_id) from captions") == [(7, 5, 7)]
    other = tables.make(tmp_path / "other", ("captions",))
    tables.write(other, "images", [{"path": name, "image_id": ""} for name in ("broken.jpg", "cut.png")])
    assert ask(other, "select count(*) from captions join images using (image_id)") == [(0,)]
    assert ask(other, "select count(*) from unused") == [(0,)]


def test_an_answer_replaces_no_file_whatever_it_is_and_a_file_without_a_query_is_refused(tmp_path: Path) -> None:
    folder = toy.make(tmp_path / "toy")
    kept = (folder / "project.toml").read_text()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "columns.parquet").write_text("of the user")
    assert json.loads(projects.latentmill(folder, "query", "select 1 as n", "--json")) == [{"n": 1}]
    for kind in ("csv", "json", "parquet"):
        said = projects.latentmill(folder, "query", "select 1", f"--{kind}", str(folder / "project.toml"), code=2)
        assert "project.toml exists; move it away or choose another name" in said
        words = ("--parquet", str(tmp_path / "all"), f"--{kind}", str(tmp_path / "one"))
        assert kind == "parquet" or "no SQL given" in projects.latentmill(folder, "query", *words, code=2)
    assert (folder / "project.toml").read_text() == kept and not (tmp_path / "all").exists()
    with pytest.raises(ValueError, match=r"columns\.parquet exists and is not of an earlier export"):
        export_parquet(tables.make(tmp_path / "whole", ()), tmp_path / "out")


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


@pytest.mark.parametrize(
    ("sql", "limits", "said"),
    [
        ("with recursive x as (select 1 as n union all select n + 1 from x) select count(*) from x", 0.2, "longer than 0.2 s"),
        ("select count(*) from range(1000000000000) a, range(1000000) b", 0.2, "longer than 0.2 s; --seconds allows more"),
        ("select string_agg(repeat('x', 1000000)) from range(1000)", 60, "needs more than 0.1 GB; --memory-gb allows more"),
        ("from range(100000000)", 60, "the answer has more than 1,000,000 rows: add a limit, or write it"),
    ],
)
def test_a_query_without_an_end_or_for_too_much_memory_is_ended(project, sql: str, limits: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_query(project, sql, limits=Limits(seconds=limits, gigabytes=0.1 if "string_agg" in sql else 8))
