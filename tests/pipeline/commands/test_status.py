"""`latentmill status` describes every state of a table, and writes nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pipeline.commands.status import render
from pipeline.project.project import Project
from pipeline.store.table import Writer
from tests import projects

EARLY = ("images", "captions", "buckets", "latents")


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny_weights) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("built") / "project", tiny_weights, images=3)
    projects.build(folder, *EARLY)
    return folder


@pytest.fixture
def project(built, tmp_path) -> Path:
    return projects.duplicate(built, tmp_path / "project")


def states_of(folder: Path) -> dict[str, str]:
    lines = [line.split("  ") for line in render(Project(folder)).splitlines()[2:]]
    return {line[0].strip(): line[-1].strip() for line in lines}


def begin(folder: Path, stage_name: str, rows: int, recipe: bool = True) -> None:
    project = Project(folder)
    stage = project.stage(stage_name)
    context = project.open(stage.name)
    context.output.pending = stage.wants(context)
    with Writer(project.current(stage_name), project.recipe(stage_name)) as writer:
        writer.append(next(iter(stage.run(context))).slice(0, rows))


def test_before_the_first_run_every_table_names_what_it_needs_and_nothing_is_written(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=2)
    said = states_of(folder)
    assert said["images"] == "2 rows missing: make images"
    assert said["captions"] == "waits for images"
    # A stage that only [train.slider] brings is not listed.
    assert list(said) == [name for name in Project(folder).stage_names if name != "drawings"]
    assert not list(folder.glob("tables/*/*"))
    projects.edit(folder, f'weights = "{tiny_weights}"\n', "")  # those that the project makes itself
    assert states_of(folder)["latents"] == "not built, weights are missing: make latents"


def test_a_table_is_up_to_date_or_being_written_or_has_missing_rows_or_waits_for_stale_inputs(project):
    said = states_of(project)
    assert {said[stage_name] for stage_name in EARLY} == {"up to date"}
    assert said["embeddings"] == "5 rows missing: make embeddings"
    assert said["train"] == "waits for embeddings"
    opened = Project(project)
    with Writer(opened.current("buckets"), opened.recipe("buckets")):
        assert f"being written by process {os.getpid()} " in states_of(project)["buckets"]
    projects.draw(project / "images" / "picture1.png", seed=77, size=(140, 100))
    said = states_of(project)
    assert said["images"] == "1 row missing, 1 row not used any more: make images"
    assert said["captions"] == said["latents"] == "waits for images"


def test_an_interrupted_stage_is_shown_with_the_rows_that_it_has(project):
    shutil.rmtree(project / "tables" / "captions")
    begin(project, "captions", 2)
    assert states_of(project)["captions"] == "interrupted: 2 of 5 rows are saved: make captions"
    projects.build(project, "captions")
    projects.add_image(project, "new.png", seed=9)
    projects.build(project, "images")
    begin(project, "captions", 1)
    assert "interrupted: " in states_of(project)["captions"]
