"""Further crops of each image ([latents] jitter): where they lie, and which runs use them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pipeline.project.project import Project
from stages.text_to_image.train.config import TrainConfig, ValidationConfig
from stages.text_to_image.train.data import load_dataset
from tests import projects

COLUMNS = ("crop_x", "crop_y", "crop_w", "crop_h")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    """A project of four images, with two further crops for three of them. The fourth has a reference image, and so no
    further crops.
    """
    made = projects.make(tmp_path_factory.mktemp("jitter") / "project", tiny_weights)
    (made / "images" / "control").mkdir()
    projects.draw(made / "images" / "control" / "picture0.png", seed=9, size=projects.SIZES[0])
    projects.edit(made, "[train]", "[latents]\njitter = 2\nflip = true\n\n[train]")
    projects.build(made, "images", "captions", "buckets", "latents", "embeddings")
    return made


def test_further_crops_lie_inside_the_crop_have_its_shape_and_differ(folder: Path) -> None:
    project = Project(folder)
    images = {row["image_id"]: row for row in project.current("images").rows().to_pylist()}
    latents = project.current("latents").rows().to_pylist()
    for bucket in project.current("buckets").rows().to_pylist():
        own = [row for row in latents if all(row[name] == bucket[name] for name in ("image_id", "width", "height"))]
        crops = Counter(tuple(row[name] for name in COLUMNS) for row in own)
        assert set(crops.values()) == {2}, "each crop and its mirror image"
        assert len(crops) == (1 if "picture0" in images[bucket["image_id"]]["path"] else 3)
        x, y, w, h = (bucket[name] for name in COLUMNS)
        assert (x, y, w, h) in crops
        for left, top, width, height in crops:
            assert width / height == pytest.approx(w / h) and 0.9 * w <= width <= w
            assert left >= x and top >= y and left + width <= x + w + 1e-6 and top + height <= y + h + 1e-6


def test_a_run_trains_on_further_crops_at_their_resolution_and_measures_none_of_them(folder: Path) -> None:
    run = Project(folder).open("train")
    run.config = TrainConfig(steps=1, validation=ValidationConfig(paths=("picture1.png",)))
    data = load_dataset(run)
    assert Counter(crop.resolution for crop in data.crops) == {64: 2 + 2 * 6, 96: 2 + 2 * 6}
    assert sorted(crop.resolution for crop in data.held) == [64, 96]
    assert len({crop.latent_id for crop in data.crops}) == len(data.crops)


def test_without_the_setting_only_further_crops_disappear_and_no_latent_is_computed_again(folder: Path) -> None:
    before = {row["latent_id"] for row in Project(folder).current("latents").rows().to_pylist()}
    projects.edit(folder, "jitter = 2", "jitter = 0")
    outcome = projects.build(folder, "latents")["latents"]
    after = {row["latent_id"] for row in Project(folder).current("latents").rows().to_pylist()}
    assert outcome.written == 0 and after < before and len(after) == 5 * 2 * 2
