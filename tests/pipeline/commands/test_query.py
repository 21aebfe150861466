"""Queries over a project's tables: what they answer, and what they say about tables that are not built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.commands.query import answer, open_catalog, run_query
from pipeline.errors import NotBuilt
from schemas.text_to_image.train import TRAIN
from stages.text_to_image import PIPELINE
from tests import projects
from tests.pipeline.commands import tables
from tests.pipeline.commands.tables import FakeProject, digest

STAGE_NAMES = tuple(PIPELINE.stages)
README = Path(__file__).parents[3] / "README.md"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> FakeProject:
    return tables.make(tmp_path_factory.mktemp("project"))


def ask(project: FakeProject, sql: str) -> list[tuple[object, ...]]:
    return open_catalog(project).execute(sql).fetchall()


def readme_queries() -> list[str]:
    return re.findall(r"```sql\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL) if README.exists() else []


def test_the_readme_shows_at_least_three_queries() -> None:
    assert len(readme_queries()) >= 3


@pytest.mark.parametrize("sql", readme_queries())
def test_every_query_of_the_readme_runs_and_answers(project: FakeProject, sql: str) -> None:
    assert len(run_query(project, sql).splitlines()) > 2


@pytest.mark.parametrize("sql", readme_queries())
def test_a_query_over_a_table_that_is_not_built_names_it_instead_of_answering_no_rows(tmp_path: Path, sql: str) -> None:
    named = "|".join(name for name in STAGE_NAMES if re.search(rf"(from|join) {name}\b", sql))
    named = named or ("images" if "unused" in sql else "")
    if not named:  # the view `tables` has an answer in every state
        assert run_query(FakeProject(tmp_path), sql)
        return
    with pytest.raises(NotBuilt, match=rf"^the table ({named}) is not built; run: make \1$"):
        run_query(FakeProject(tmp_path), sql)


@pytest.mark.parametrize(
    "sql",
    ["SELECT * FROM LATENTS", "explain select * from latents", "pivot latents on flip", "select 1; select * from latents"],
)
def test_capitals_and_unusual_statements_name_a_table_that_is_not_built_too(tmp_path: Path, sql: str) -> None:
    with pytest.raises(NotBuilt, match="the table latents is not built"):
        run_query(FakeProject(tmp_path), sql)


def test_answers_are_arrow_tables_too(project: FakeProject, tmp_path: Path) -> None:
    assert answer(project, "select path from images where path = 'a.jpg'").to_pydict() == {"path": ["a.jpg"]}
    with pytest.raises(NotBuilt, match="the table train is not built"):
        answer(FakeProject(tmp_path), "select avg(loss) from train")
    with pytest.raises(ValueError, match="returns no rows"):
        answer(project, "")


def test_every_table_has_its_name_and_shows_live_rows_only(project: FakeProject) -> None:
    counts = {stage_name: ask(project, f"select count(*) from {stage_name}")[0][0] for stage_name in STAGE_NAMES}
    expected = {"images": 7, "captions": 7, "checks": 2, "descriptions": 0, "buckets": 10, "latents": 3, "embeddings": 4}
    expected |= {"train": 46, "samples": 2, "scores": 3}
    assert counts == expected


def test_a_table_that_is_not_built_has_its_columns_and_no_rows(tmp_path: Path) -> None:
    early = tables.make(tmp_path, STAGE_NAMES[:2])
    assert ask(early, "select * from train join buckets using (image_id)") == []
    names = [row[0] for row in ask(early, "describe train")]
    assert names == TRAIN.stored.names
    assert ask(early, "select stage, recipe, rows, bytes from tables where not built limit 1") == [("checks", None, 0, 0)]


def test_losses_join_with_paths_and_captions(project: FakeProject) -> None:
    sql = """
    select path, text, avg(loss) from train join images using (image_id) join captions using (image_id, caption_id)
    where images.rejected is null group by all order by path
    """
    found = ask(project, sql)
    assert [row[:2] for row in found] == [("a.jpg", "a red cat"), ("sub/b.png", "a blue dog")]
    assert found[0][2] > found[1][2]


def test_unused_names_every_image_that_is_not_trained_once_with_the_first_reason(project: FakeProject) -> None:
    found = {path: (table, reason) for path, table, reason in ask(project, "select path, stage, reason from unused")}
    assert found == {
        "broken.jpg": ("images", "truncated: ends after 99 bytes"),
        "copy-of-a.jpg": ("images", "duplicate: of a.jpg"),
        "mute.png": ("captions", "no caption"),
        "thin.png": ("buckets", "too_small"),
        "late.png": ("latents", "cannot be decoded"),
    }
    assert set(found) | set(tables.TRAINED) == set(tables.IMAGES)


def test_before_captions_are_built_no_image_is_unused_for_lack_of_one(tmp_path: Path) -> None:
    early = tables.make(tmp_path, ("images",))
    assert {row[0] for row in ask(early, "select stage from unused")} == {"images"}


def test_the_view_tables_has_rows_dead_rows_and_bytes(project: FakeProject) -> None:
    rows = {row[0]: row[1:] for row in ask(project, "select stage, built, recipe, rows, dead, bytes from tables")}
    assert list(rows) == list(STAGE_NAMES)
    assert rows["latents"][:4] == (True, tables.RECIPE, 3, 1)
    on_disk = sum(p.stat().st_size for p in project.folder("latents").folder.rglob("*") if p.is_file())
    assert rows["latents"][4] == on_disk > 0


def test_the_view_columns_describes_every_column(project: FakeProject) -> None:
    found = ask(project, "select doc from columns where stage = 'train' and name = 'sigma'")
    assert found == [("noise level, 0 (clean) to 1 (noise)",)]
    assert ask(project, "select name from columns where stage = 'buckets' and key") == [("image_id",), ("resolution",)]


def test_bf16_gives_the_value_of_a_stored_word(project: FakeProject) -> None:
    import pyarrow.dataset

    catalog = open_catalog(project)
    catalog.register("parts", pyarrow.dataset.dataset(project.folder("latents").shards, format="ipc"))
    sql = "select list_transform(tensor, lambda w: bf16(w)) from parts join latents using (latent_id) where latents.image_id = $1"
    assert catalog.execute(sql, [digest("a.jpg")]).fetchall() == [([1.0, -1.0, 2.0, 0.0],)]
    words = [0x7F80, 0xFF80, 0x4049, 0xC049, 0x0001]
    found = catalog.execute(f"select {', '.join(f'bf16({w})' for w in words)}").fetchall()[0]
    assert found == (float("inf"), float("-inf"), 3.140625, -3.140625, 0.0)


def test_a_duckdb_connection_gets_the_tables_of_a_project(project: FakeProject) -> None:
    import duckdb

    connection = duckdb.connect()
    assert open_catalog(project, connection) is connection
    assert connection.sql("select count(*) from images").fetchall() == [(7,)]
    open_catalog(project, connection)  # again: the tables as they are now
    assert connection.sql("select count(*) from unused").fetchall() == [(5,)]


def test_a_partly_built_project_without_weights_is_opened_by_its_path(tmp_path: Path) -> None:
    folder = projects.make(tmp_path / "project", tmp_path / "absent", images=2)
    projects.build(folder, "images", "captions")
    catalog = open_catalog(str(folder))
    sql = "select path, text from images join captions using (image_id) order by path"
    assert catalog.sql(sql).fetchall() == [(f"picture{n}.png", f"picture number {n}") for n in (0, 1)]
    built = catalog.sql("select stage, rows from tables where built").fetchall()
    assert built == [("images", 2), ("captions", 4)]
    assert catalog.sql("select * from train join latents using (image_id)").fetchall() == []


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("select * from imags", r'Did you mean "images"\? There are images, captions, .*, scores, .*all_train, .*unused'),
        ("select pth from images", r"pth.* images has path, image_id, .*detail"),
        ("select images.pth from images join buckets using (image_id)", r"buckets has image_id, resolution, .*images has path"),
        ("selec 1", "syntax error"),
        ("select path + 1 from images where path > []", "Error"),
        ("select * from sql", "Table with name sql does not exist"),
        ("", "SQL is empty"),
        ("-- nothing", "SQL is empty"),
        ("copy images to '/nonexistent/images.csv'", "a query reads only the tables; --unsafe allows more"),
    ],
)
def test_a_mistake_in_sql_is_one_line_with_the_names_that_exist(project: FakeProject, sql: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        run_query(project, sql)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000 and "LINE" not in str(error.value)
    with pytest.raises(ValueError, match="style must be one of"):
        run_query(project, "select 1", "html")


def test_parquet_files_and_a_catalog_hold_every_table(project: FakeProject, tmp_path: Path) -> None:
    import duckdb

    from pipeline.commands.query import export_parquet

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
    "sql", ["select count(*) from TRAIN", 'from "train"', "create table x as select * from train", "pivot train on step"]
)
def test_a_table_that_is_not_built_is_named_however_it_is_written(tmp_path: Path, sql: str) -> None:
    with pytest.raises(ValueError, match="the table train is not built; run: make train"):
        run_query(FakeProject(tmp_path), sql)
