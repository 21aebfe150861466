"""The example project and the pictures of the tests: usable, captioned, free to redistribute, and nothing to download."""

from pathlib import Path

import pytest

from pipeline.project.project import Project
from tests import projects

FOLDERS = (projects.ROOT / "data" / "projects" / "example", projects.MATERIAL)


@pytest.mark.parametrize("source", FOLDERS, ids=lambda folder: folder.name)
def test_24_usable_images_have_a_licence_a_caption_of_their_own_and_a_crop_at_every_resolution(source: Path, tmp_path: Path):
    folder = projects.copied(source, tmp_path / source.name)
    projects.build(folder, "images", "captions", "buckets")
    images, captions, buckets = (projects.content(folder, name).to_pylist() for name in ("images", "captions", "buckets"))
    assert len(images) == 24 and all(row["rejected"] is None for row in images)
    licences = (source / "LICENSES.md").read_text()
    assert all(f"| `images/{row['path']}` | " in licences for row in images)
    assert "Copyright (c) Microsoft Corporation." in licences
    own = [row for row in captions if row["image_id"]]
    assert {row["image_id"] for row in own} == {row["image_id"] for row in images}
    assert {row["source"] for row in own} <= {"sidecar", "metadata"}
    project = Project(folder)
    resolutions = project.config.sections["buckets"].resolutions
    assert len(buckets) == 24 * len(resolutions) and all(row["rejected"] is None for row in buckets)
    assert not project.family.hub and not project.config.project.weights, "its weights are bundled or generated"
    assert project.config.sections["captions"].preview_prompts
