"""A table that the version before wrote is read as it is, and takes the names of today in the next run."""

import shutil
from pathlib import Path

import pytest

from pipeline import runner
from pipeline.commands.status import describe, states
from pipeline.project.project import Project
from pipeline.store.rows import missing
from pipeline.store.writer import Writer
from tests import projects
from tests.pipeline.killing import count_syncs, run_and_kill
from tests.pipeline.store.old_table import main as migrate
from tests.pipeline.store.old_table import make_old, old_columns, write_old_table
from tests.pipeline.store.stores import check_tensors, names, numbers, state, vectors, written

OLD_TABLE = "tests.pipeline.store.old_table"


def test_readers_see_an_old_table_with_the_names_of_today_and_change_nothing(tmp_path: Path):
    table, new = write_old_table(tmp_path / "old", *range(12)), written(tmp_path / "new", *range(12))
    before = state(table.folder)
    assert table.exists and table.has_current_columns and table.usage()["shards"] == 3
    assert table.rows().schema.equals(new.rows().schema, check_metadata=True)
    assert table.rows()["checksum"].null_count == 12
    shown = table.rows().select([name for name in new.rows().column_names if name not in ("shard", "byte_offset", "checksum")])
    assert shown.equals(new.rows().select(shown.column_names))
    assert table.committed().num_rows == 12 and table.reclaimable_bytes() == 0
    check_tensors(table)
    assert state(table.folder) == before and table.shards.name == "parts" and "part" in old_columns(table)


def test_the_next_writer_renames_folder_and_column_and_keeps_every_shard(tmp_path: Path):
    table = write_old_table(tmp_path / "t", *range(12))
    shards = state(table.shards)
    with Writer(table, {"stage": "vectors"}) as writer:
        assert missing(names(*range(12)), writer.stored).num_rows == 0
        assert numbers(table.rows()) == list(range(12))  # readers meanwhile
        check_tensors(table)
        writer.finish(names(*range(12)), {})
    assert table.shards.name == "shards" and not (table.folder / "parts").exists()
    assert state(table.shards) == shards and "part" not in old_columns(table) and "checksum" in old_columns(table)
    assert numbers(table.rows()) == list(range(12))
    check_tensors(table)


def test_a_reader_opened_before_the_migration_goes_on_after_it(tmp_path: Path):
    table = write_old_table(tmp_path / "t", *range(12))
    reader = table.tensors()
    assert reader.read("row-00000").max() == 0  # of the first of three shards
    with Writer(table, {}) as writer:
        writer.finish(None, {})
    assert [reader.read(f"row-{n:05d}").max() for n in range(12)] == list(range(12))


def test_an_old_table_takes_new_rows_replacements_and_cleaning(tmp_path: Path):
    table = write_old_table(tmp_path / "t", *range(12))
    with Writer(table, {}) as writer:
        writer.append(vectors(3, 12, add=100))
        writer.finish(names(1, 3, 12), {})
        assert writer.collect() > 0
    assert table.rows()["number"].to_pylist() == [1, 103, 112]
    check_tensors(table)


def test_the_index_of_an_old_table_is_rebuilt_from_its_shards(tmp_path: Path):
    table = write_old_table(tmp_path / "t", *range(12))
    shutil.rmtree(table.index.path)
    with Writer(table, {}) as writer:
        writer.finish(None, {})
    assert numbers(table.rows()) == list(range(12))
    check_tensors(table)


@pytest.mark.slow
@pytest.mark.proof("a migration that is killed anywhere loses nothing")
def test_a_migration_killed_before_any_of_its_fsyncs_shows_the_old_rows_and_is_completed(tmp_path: Path, cases):
    folder = str(write_old_table(tmp_path / "all", *range(12)).folder)
    total = count_syncs(lambda: migrate([folder]))
    count = cases(6, total)
    for number in sorted({1 + round(place * (total - 1) / (count - 1)) for place in range(count)}):
        table = write_old_table(tmp_path / str(number), *range(12))
        code, text = run_and_kill(number, OLD_TABLE, str(table.folder))
        assert code != 0, text
        assert numbers(table.rows()) in (list(range(12)), [*range(12), 20, 21])
        check_tensors(table)
        migrate([str(table.folder)])
        assert numbers(table.rows()) == [*range(12), 20, 21] and "part" not in old_columns(table)
        check_tensors(table)


@pytest.mark.slow
def test_a_project_of_the_version_before_is_up_to_date_and_its_next_run_computes_nothing(tmp_path: Path, tiny_weights: Path):
    folder = projects.make(tmp_path / "project", tiny_weights, images=2)
    projects.build(folder)
    project = Project(folder)
    before = {name: projects.content(folder, name) for name in project.stage_names}
    recipes = {name: project.recipe(name) for name in project.stage_names}
    for name in project.stage_names:
        make_old(project.current(name))
    old = Project(folder)
    assert old.current("latents").shards.name == "parts"
    assert {describe(each) for each in states(old)} == {"up to date"}
    assert {name: projects.content(folder, name) for name in old.stage_names} == before
    assert {name: old.recipe(name) for name in old.stage_names} == recipes
    for name in old.stage_names:
        assert runner.run(Project(folder), name, projects.Silent()).up_to_date, name
    assert all(not (Project(folder).current(name).folder / "parts").exists() for name in old.stage_names)
    assert {name: projects.content(folder, name) for name in old.stage_names} == before
    assert {name: Project(folder).recipe(name) for name in old.stage_names} == recipes
