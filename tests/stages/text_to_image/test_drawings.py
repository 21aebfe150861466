"""A project of a slider, without pictures: `init`, the stage `drawings`, previews at both signs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.api import Project
from pipeline.commands.init import new_project
from pipeline.project.edit import edited
from stages.text_to_image.samples.stage import file_name
from tests import projects

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    folder = projects.make_slider(tmp_path_factory.mktemp("slider") / "project", tiny_weights)
    file = folder / "project.toml"
    file.write_text(edited(file.read_text(), {"samples.width": 32, "samples.height": 32, "samples.steps": 1}))
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
    drawn = project.adapter().generate(row["prompt"], seed=row["seed"], strength=-2)
    np.testing.assert_array_equal(np.array(drawn), np.array(Image.open(folder / row["path"])))


def test_init_says_what_a_slider_and_what_pictures_need(tmp_path):
    for options, message in (
        ({**projects.SLIDER, "images": str(tmp_path)}, "--images must be left out with --preset slider"),
        ({**projects.SLIDER, "neutral": ""}, "neutral must list prompts"),
        ({**projects.SLIDER, "positive": ""}, "positive must be a prompt"),
        ({"preset": "style"}, "init needs --images"),
    ):
        with pytest.raises(ValueError, match=message):
            new_project(tmp_path / "new", {"family": "tiny", **options})
