"""`status` says what is true in every state a table can be in, and changes nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pipeline.commands.status import describe, render, state
from pipeline.project.project import Project
from pipeline.store.writer import Writer
from tests import projects

EARLY = ("images", "captions", "buckets", "latents")


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny_weights) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("built") / "project", tiny_weights, images=3)
    projects.build(folder, *EARLY)
    return folder


@pytest.fixture
def project(built, tmp_path) -> Path:
    shutil.copytree(built, tmp_path / "project", copy_function=shutil.copy2)
    projects.build(tmp_path / "project", "images")
    return tmp_path / "project"


def told(folder: Path) -> dict[str, str]:
    """The last column, by table."""
    lines = [line.split("  ") for line in render(Project(folder)).splitlines()[2:]]
    return {line[0].strip(): line[-1].strip() for line in lines}


def begin(folder: Path, stage_name: str, rows: int, recipe: bool = True) -> None:
    """Leave a table as a run that is killed after some rows does."""
    project = Project(folder)
    stage = project.stage(stage_name)
    context = project.context(stage)
    context.pending = stage.wants(context)
    with Writer(project.current(stage_name), project.recipe(stage_name)) as writer:
        writer.append(next(iter(stage.run(context))).slice(0, rows))


def test_before_the_first_run_every_table_says_what_it_lacks_and_nothing_is_written(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=2)
    said = told(folder)
    assert said["images"] == "2 rows missing: make images"
    assert said["captions"] == "waits for images"
    assert list(said) == list(Project(folder).stage_names)
    assert {path.name for path in folder.rglob("*")} >= {"project.toml"} and not list(folder.glob("tables/*/*"))


def test_weights_that_the_project_makes_itself_are_no_mistake(tmp_path):
    folder = projects.make(tmp_path / "project", tmp_path, images=2)
    projects.edit(folder, f'weights = "{tmp_path}"\n', "")
    assert told(folder)["latents"] == "not built; its weights come with it: make latents"


def test_built_tables_are_up_to_date_and_the_next_one_waits_or_is_missing(project):
    said = told(project)
    assert {said[stage_name] for stage_name in EARLY} == {"up to date"}
    assert said["embeddings"] == "5 rows missing: make embeddings"
    assert said["train"] == "waits for embeddings"


def test_a_killed_stage_says_how_many_rows_it_has(project):
    shutil.rmtree(project / "tables" / "captions")
    begin(project, "captions", 2)
    assert told(project)["captions"] == "interrupted: 2 of 5 rows are there: make captions"
    projects.build(project, "captions")
    projects.add_image(project, "new.png", seed=9)
    projects.build(project, "images")
    begin(project, "captions", 1)
    assert "interrupted: " in told(project)["captions"]


def test_a_stage_that_is_running_is_named_with_its_process(project):
    opened = Project(project)
    with Writer(opened.current("buckets"), opened.recipe("buckets")):
        assert f"being written by process {os.getpid()} " in told(project)["buckets"]
    assert told(project)["buckets"] == "up to date"


def test_what_depends_on_a_changed_folder_is_not_simply_up_to_date(project):
    projects.draw(project / "images" / "picture1.png", seed=77, size=(140, 100))
    said = told(project)
    assert said["images"] == "1 row missing, 1 row no longer wanted: make images"
    assert said["captions"] == said["latents"] == "up to date, but images is not"


def test_rows_that_are_wanted_again_are_not_called_missing(project):
    before = Project(project).current("latents").usage()["rows"]
    projects.edit(project, "[64, 96]", "[64]")
    projects.build(project, "buckets", "latents")
    projects.edit(project, "[64]", "[64, 96]")
    projects.build(project, "buckets")
    found = state(Project(project), "latents")
    assert (found.missing, found.unpublished) == (0, before // 2)
    assert describe(found) == f"{before // 2} rows wanted again: make latents"


def test_weights_that_are_gone_leave_a_table_up_to_date(project, tiny_weights, tmp_path):
    shutil.copytree(tiny_weights, tmp_path / "gone")
    projects.edit(project, str(tiny_weights), str(tmp_path / "gone"))
    assert told(project)["latents"] == "up to date"
    shutil.rmtree(tmp_path / "gone")
    assert told(project)["latents"] == "up to date"
