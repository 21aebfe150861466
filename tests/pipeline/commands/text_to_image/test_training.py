"""A stage that ends early of its own accord, through the runner and the console."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.commands.run import summary
from pipeline.commands.text_to_image import training as module
from tests import projects


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_weights) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("whole") / "cats", tiny_weights, images=2)
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings", "train", "samples")
    return folder


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    """As `whole`, before its training."""
    folder = Path(shutil.copytree(whole, tmp_path / "segments" / "cats", copy_function=shutil.copy2, symlinks=True))
    for name in ("train", "samples"):
        shutil.rmtree(folder / "tables" / name)
    return folder


def test_training_in_segments_ends_with_the_table_of_an_unbroken_run(whole, folder):
    projects.edit(folder, "steps = 6\nrank", "steps = 6\nstop_after_steps = 4\nrank")
    first = projects.build(folder, "images", "train")["train"]
    assert (first.written, first.left) == (4, 2)
    assert not first.up_to_date
    assert summary(first) == (
        "train: stopped after 4 steps, as [train] stop_after_steps says; 4 steps done and saved, 2 to do. "
        "Run the same command to go on."
    )
    said = projects.latentmill(folder, "run", "train", "--only")
    assert "2 steps done, 6 in all" in said
    assert projects.content(folder, "train").equals(projects.content(whole, "train"))
    assert projects.latentmill(folder, "replay", "5").endswith("step 5: the same to the bit\n")


def test_a_run_that_validation_ends_early_is_up_to_date(folder):
    projects.edit(folder, "[samples]", "[train.validation]\nevery = 1\npatience = 2\nmin_delta = 100.0\n\n[samples]")
    assert projects.build(folder, "images", "train")["train"].left == 0
    assert max(projects.content(folder, "train")["step"].to_pylist()) == 2
    assert projects.build(folder, "train")["train"].up_to_date


def test_segments_draw_previews_and_end_with_the_tables_of_an_unbroken_run_or_the_exit_code_of_what_failed(whole, folder):
    assert "no such folder" in projects.latentmill(folder / "nowhere", "segments", code=2)
    said = projects.latentmill(folder, "segments", "--every", "4")
    said = said[said.index("train:") :]  # after the stages before
    assert said.index("stopped after 4 steps") < said.index("grid:") < said.index("2 steps done")
    assert said.count("grid:") == 2
    for stage_name in ("train", "samples"):
        assert projects.content(folder, stage_name).equals(projects.content(whole, stage_name))


def test_segments_with_patience_end_after_so_many_without_a_better_score(monkeypatch, capsys):
    scores = iter([{4: 0.2}, {4: 0.2, 8: 0.6}, {12: 0.6}, {16: 0.5}, {20: 0.9}])
    ran: list[str] = []
    found: Any = SimpleNamespace(current=True)
    project: Any = SimpleNamespace(refresh=lambda: None)
    monkeypatch.setattr(module, "run_words", lambda _, stage, only: [stage])
    monkeypatch.setattr(module, "run_apart", lambda words: ran.append(words[0]) or 0)
    monkeypatch.setattr(module, "state", lambda *_: SimpleNamespace(missing=1))
    monkeypatch.setattr(module, "find_runs", lambda _: [found])
    monkeypatch.setattr(module, "checkpoint_scores", lambda *_: next(scores))
    assert module.segments(project, 4, 2) == 0
    assert ran == ["train", "samples", "scores"] * 4
    assert "2 segments had no better score than step 8; export it with --step 8" in capsys.readouterr().out
