"""The example project and the pictures of the tests: usable, captioned, free to redistribute, and nothing to download."""

from pathlib import Path

import pytest

from pipeline.project.project import Project
from tests import projects

FOLDERS = (projects.ROOT / "data" / "projects" / "example", projects.MATERIAL)


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A project in the checkout, and a copy of it with the tables images, captions and buckets."""
    folder = projects.copied(request.param, tmp_path_factory.mktemp("copy") / request.param.name)
    projects.build(folder, "images", "captions", "buckets")
    return request.param, folder


def test_there_are_24_usable_images_each_with_its_licence(built):
    source, folder = built
    rows = projects.content(folder, "images").to_pylist()
    assert len(rows) == 24 and all(row["rejected"] is None for row in rows)
    licences = (source / "LICENSES.md").read_text()
    assert all(f"| `images/{row['path']}` | " in licences for row in rows)
    assert "Copyright (c) Microsoft Corporation." in licences


def test_every_image_has_a_caption_of_its_own(built):
    _, folder = built
    images = {row["image_id"] for row in projects.content(folder, "images").to_pylist()}
    captions = [row for row in projects.content(folder, "captions").to_pylist() if row["image_id"]]
    assert {row["image_id"] for row in captions} == images
    assert {row["source"] for row in captions} <= {"sidecar", "metadata"}


def test_every_image_is_trained_on_at_every_resolution(built):
    _, folder = built
    rows = projects.content(folder, "buckets").to_pylist()
    resolutions = Project(folder).config.sections["buckets"].resolutions
    assert len(rows) == 24 * len(resolutions) and all(row["rejected"] is None for row in rows)


def test_its_weights_are_bundled_or_generated_and_it_has_preview_prompts(built):
    project = Project(built[1])
    assert not project.family.hub and not project.config.project.weights
    assert project.config.sections["captions"].preview_prompts
