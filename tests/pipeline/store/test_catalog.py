"""LanceDB lists every finished table by its name, and the links by which it does so disturb nothing."""

import errno
import shutil
from pathlib import Path

import pytest

from pipeline.api import Project
from pipeline.commands.clean import clean
from pipeline.commands.status import describe, states
from pipeline.store.table import TableFolder, Writer, link_table
from tests import projects
from tests.pipeline.store.stores import VECTORS, vectors, written
from tests.toy.project import make


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make(tmp_path_factory.mktemp("built") / "project")
    projects.build(folder)
    return folder


@pytest.fixture
def project(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "project", copy_function=shutil.copy2, symlinks=True)


def test_lancedb_lists_and_opens_every_finished_table_of_a_copied_project_by_relative_links(project: Path):
    assert all(not path.readlink().is_absolute() for path in (project / "tables").glob("*.lance"))
    opened = Project(project)
    assert sorted(opened.lancedb().list_tables().tables) == sorted(opened.stage_names)
    for name in opened.stage_names:
        rows = opened.lancedb().open_table(name).search().where("live").limit(1000).to_arrow()
        expected = opened[name].to_arrow()
        key = [(column, "ascending") for column in opened.stage(name).writes.key]
        assert rows.select(expected.column_names).cast(expected.schema).sort_by(key) == expected.sort_by(key)


def test_a_copy_that_followed_the_links_counts_no_table_twice_and_gets_links_again_in_the_next_run(project: Path, tmp_path: Path):
    copy = shutil.copytree(project, tmp_path / "copy")
    assert not (copy / "tables" / "lines.lance").is_symlink()
    assert {describe(each) for each in states(Project(copy))} == {"up to date"}
    projects.build(copy)
    assert (copy / "tables" / "lines.lance").is_symlink()
    sizes = [each.nbytes for each in states(Project(project))]
    for path in (project / "tables").glob("*.lance"):
        path.unlink()
    assert [each.nbytes for each in states(Project(project))] == sizes
    assert list(clean(Project(project), runs=True, dry_run=True)) == ["would free 0 B"]


def test_a_link_leads_to_the_table_of_the_last_run_also_if_it_had_nothing_to_do_and_clean_moves_it(project: Path):
    def linked() -> Path:
        return (project / "tables" / "tokens.lance").resolve().parent

    settings, (old,) = (project / "project.toml").read_text(), (project / "tables" / "tokens").iterdir()
    projects.edit(project, "[project]", "[tokens]\nmost = 8\n\n[project]")
    projects.build(project, "tokens")
    other = linked()
    assert other == Project(project).current("tokens").folder.resolve() != old.resolve()
    (project / "project.toml").write_text(settings)
    list(clean(Project(project), runs=False, dry_run=True))
    assert linked() == other and other.is_dir()
    again = shutil.copytree(project, project.with_name("again"), copy_function=shutil.copy2, symlinks=True)
    assert projects.build(again, "tokens")["tokens"].up_to_date
    assert (again / "tables" / "tokens.lance").resolve().parent.name == old.name
    list(clean(Project(project), runs=False, dry_run=False))
    assert linked() == old.resolve() and not other.exists()


def test_a_link_that_leads_nowhere_is_deleted_and_a_run_that_is_not_finished_is_not_linked(tmp_path: Path):
    table = TableFolder(tmp_path / "tables" / "vectors" / "recipe", VECTORS)
    with Writer(table, {}) as writer:
        writer.append(vectors(1))
        writer.flush()
        link_table(table)
        assert not list((tmp_path / "tables").glob("*.lance"))
        writer.finish(None, {})
    link_table(table)
    assert (tmp_path / "tables" / "vectors.lance").is_dir()
    shutil.rmtree(table.folder)
    link_table(table)
    assert not (tmp_path / "tables" / "vectors.lance").is_symlink()


def test_where_no_link_can_be_made_nothing_fails_but_a_full_disk_is_said(tmp_path: Path, monkeypatch):
    table = written(tmp_path / "tables" / "vectors" / "recipe", 1, 2)
    errors: list[OSError] = [PermissionError("no links on this disk")]

    def refuse(self: Path, target: Path) -> None:
        raise errors[-1]

    monkeypatch.setattr(Path, "symlink_to", refuse)
    link_table(table)
    assert table.rows().num_rows == 2 and not list((tmp_path / "tables").glob("*.lance"))
    errors.append(OSError(errno.ENOSPC, "no space left on device"))
    with pytest.raises(ValueError, match=r"disk full while linking .*vectors.lance: its rows are kept; free 100 MB"):
        link_table(table)
