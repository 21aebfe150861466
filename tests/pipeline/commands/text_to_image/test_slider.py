"""A project without pictures: `init`, the stage `drawings` under kills, previews at both signs."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.commands.init import new_project
from pipeline.project.edit import edited
from pipeline.project.project import Project
from stages.text_to_image.samples.stage import file_name
from tests import projects
from tests.pipeline.commands.text_to_image.test_generate import pictures as drawn_by_generate
from tests.pipeline.kill_loop import rebuild_under_kills
from tests.pipeline.killing import count_syncs

pytestmark = pytest.mark.slow
SLIDER = {"preset": "slider", "positive": "{caption}, old", "negative": "{caption}, young", "neutral": "a man; a cat"}
SMALL = {"embeddings.precision": "float32", "train.precision": "float32", "train.steps": 2, "train.lr": 0.1}
SMALL |= {"train.checkpoint_every": 2, "drawings.seeds": [0]}
DRAWN = {"precision": "float32", "width": 64, "height": 64, "steps": 2}
SMALL |= {f"{section}.{key}": value for section in ("drawings", "samples") for key, value in DRAWN.items()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    folder = tmp_path_factory.mktemp("slider") / "project"
    new_project(folder, {**SLIDER, "family": "tiny", "weights": str(tiny_weights)})
    file = folder / "project.toml"
    file.write_text(edited(file.read_text(), SMALL))
    told = projects.latentmill(folder, "plan")
    assert "2 drawings" in told and "10 previews" in told
    projects.latentmill(folder, "run", "samples")
    return folder


def test_a_slider_of_two_prompts_is_drawn_trained_and_shown_from_end_to_end(built):
    project = Project(built)
    assert [project.current(name).rows().num_rows for name in ("images", "drawings", "train")] == [0, 2, 2]
    rows = project.current("samples").rows().to_pylist()
    folder = project.current("samples").folder / "artifacts"
    strengths = [float(row["adapter_id"].partition("*")[0]) if "*" in row["adapter_id"] else None for row in rows]
    assert sorted(each for each in strengths if each is not None) == [-2, -2, -1, -1, 2, 2]
    assert all(row["path"] == f"images/{file_name(row)}.png" for row in rows) and len({row["path"] for row in rows}) == 10
    pictures = [np.array(Image.open(folder / row["path"])) for row in rows if row["prompt"] == "a man"]
    assert all(not np.array_equal(a, b) for n, a in enumerate(pictures) for b in pictures[:n])
    # `generate` draws the same picture at the same strength.
    row = next(row for row, strength in zip(rows, strengths, strict=True) if strength == -2)
    drawn = drawn_by_generate(built, row["prompt"], "--strength", "-2")[0]
    np.testing.assert_array_equal(drawn, np.array(Image.open(folder / row["path"])))


@pytest.mark.proof("a stage that is killed ends where an unbroken run ends")
def test_drawings_killed_before_any_fsync_end_where_an_unbroken_run_ends(built, tmp_path, cases: Callable[[int, int], int]):
    folder = tmp_path / "project"
    shutil.copytree(built, folder, copy_function=shutil.copy2, symlinks=True)
    shutil.rmtree(folder / "tables" / "drawings")
    syncs = count_syncs(functools.partial(projects.latentmill, folder, "run", "drawings", "--only"))
    rebuild_under_kills(folder, "drawings", syncs, cases(1, 20))
    assert projects.content(folder, "drawings") == projects.content(built, "drawings")
    assert Project(folder).recipe("train") == Project(built).recipe("train")


def test_init_says_what_a_slider_and_what_pictures_need(tmp_path):
    for options, message in (
        ({**SLIDER, "images": str(tmp_path)}, "--images must be left out with --preset slider"),
        ({**SLIDER, "neutral": ""}, "neutral must list prompts"),
        ({**SLIDER, "positive": ""}, "positive must be a prompt"),
        ({"preset": "style"}, "init needs --images"),
    ):
        with pytest.raises(ValueError, match=message):
            new_project(tmp_path / "new", {"family": "tiny", **options})
