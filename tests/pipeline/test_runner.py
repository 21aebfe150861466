"""What a run reports about itself."""

import shutil

import mlx.core as mx

from pipeline import runner
from pipeline.project.project import Project
from stages.models import weights
from tests import projects


def test_a_row_that_a_run_writes_twice_is_counted_once(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=3)
    shutil.copy(folder / "images" / "picture1.png", folder / "images" / "copy of picture1.png")
    outcome = projects.build(folder, "images")["images"]  # the copy's row is written again once it is known as a duplicate
    assert projects.content(folder, "images")["rejected"].to_pylist().count("duplicate") == 1
    assert (outcome.written, outcome.rows) == (4, 4)
    assert projects.build(folder, "images")["images"].up_to_date


def test_each_stage_with_a_large_model_says_how_much_of_it_is_read(tmp_path, tiny_weights, monkeypatch):
    monkeypatch.setattr(weights, "LARGE", 0)
    folder, said = projects.make(tmp_path / "project", tiny_weights, images=1), {}
    for name in ("images", "captions", "buckets", "latents", "embeddings", "train", "samples"):
        console = projects.Silent()
        projects.build(folder, name, console=console)
        said[name] = {note for note in console.notes if note.startswith("reading")}
    assert {name: notes for name, notes in said.items() if notes} == {
        "embeddings": {"reading the text encoder: 0.0 of 0.0 GB"},
        "train": {"reading the transformer: 0.0 of 0.0 GB"},
        "samples": {"reading the transformer: 0.0 of 0.0 GB"},
    }


def test_a_model_leaves_memory_when_its_stage_ends_although_the_project_stays_open(tmp_path, tiny_weights):
    project = Project(projects.make(tmp_path / "p", tiny_weights, images=2))
    for name in ("images", "captions", "embeddings"):
        before = mx.get_active_memory()
        runner.run(project, name, projects.Silent())
        assert mx.get_active_memory() <= before + 4096, name
        project.refresh()
