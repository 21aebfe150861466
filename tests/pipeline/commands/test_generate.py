"""project.adapter(): an image that is drawn through the Python API is the preview of the stage samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from pipeline.api import Project
from tests import projects

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    """A project with an adapter that changes its previews, and the previews of every checkpoint."""
    folder = projects.make(tmp_path_factory.mktemp("generate") / "project", tiny_weights, images=2)
    projects.edit(folder, "rank = 2", "rank = 2\nlr = 0.1")
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings", "train", "samples")
    return folder


def preview(project: Project, step: int) -> tuple[dict[str, Any], np.ndarray]:
    """The row and the pixels of the preview of a step; 0 is the base."""
    table = project.current("samples")
    (row,) = [row for row in table.rows().to_pylist() if row["step"] == step]
    with Image.open(table.folder / "artifacts" / row["path"]) as image:
        return row, np.asarray(image)


@pytest.mark.parametrize("step", [None, 2])
def test_an_image_is_the_preview_of_the_same_prompt_seed_and_adapter_to_the_bit(built, step):
    project = Project(built)
    adapter = project.adapter(step=step)
    row, expected = preview(project, step or 6)
    assert adapter.step == row["step"] and adapter.path.is_file()
    assert not np.array_equal(expected, preview(project, 0)[1]), "the adapter changes nothing"
    np.testing.assert_array_equal(np.asarray(adapter.generate(row["prompt"], seed=row["seed"])), expected)


def test_with_strength_0_the_base_alone_draws(built):
    project = Project(built)
    row, expected = preview(project, 0)
    np.testing.assert_array_equal(np.asarray(project.adapter().generate(row["prompt"], strength=0.0)), expected)


def test_arguments_replace_the_settings_of_samples(built):
    adapter = Project(built).adapter()
    plain, wide = adapter.generate("a red thing"), adapter.generate("a red thing", width=96, height=32)
    assert plain.size == (64, 64) and wide.size == (96, 32)
    others = [{"seed": 1}, {"steps": 3}, {"guidance": 1.0}, {"strength": 0.5}]
    images = [np.asarray(adapter.generate("a red thing", **change)) for change in others]
    assert all(not np.array_equal(image, np.asarray(plain)) for image in images)


@pytest.mark.parametrize(("change", "line"), [({"width": 40}, "width must be a multiple of 16"), ({"steps": 0}, "step")])
def test_an_argument_that_cannot_be_drawn_with_is_refused(built, change, line):
    with pytest.raises(ValueError, match=line):
        Project(built).adapter().generate("a red thing", **change)


def test_an_adapter_that_does_not_exist_is_refused_with_those_that_do(built):
    with pytest.raises(ValueError, match="checkpoints are 2, 4, 6"):
        Project(built).adapter(step=3)
    with pytest.raises(ValueError, match="no best adapter"):
        Project(built).adapter("best")


def test_memory_is_released_after_an_image(built):
    adapter = Project(built).adapter()
    mx.clear_cache()
    before = mx.get_active_memory()
    image = adapter.generate("a red thing")
    assert image.size == (64, 64) and mx.get_active_memory() <= before
