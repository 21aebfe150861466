"""A new project begins with what its family can do."""

from pathlib import Path

import pytest

from pipeline.project.init import new_project
from pipeline.project.project import Project
from stages.text_to_image.families import FAMILIES, family
from tests.projects import draw


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    draw(folder / "a.png", seed=0, size=(64, 64))
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_a_new_project_of_every_family_opens_and_says_where_the_weights_come_from(tmp_path, images, name):
    new_project(tmp_path / "new", {"images": str(images), "family": name})
    made = Project(tmp_path / "new")
    assert made.family is family(name)
    assert f'weights = ""  # a folder or a hub id; empty: {made.family.source}' in (tmp_path / "new/project.toml").read_text()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_new_project_has_its_familys_own_settings_and_the_usual_ones_for_the_rest(tmp_path, images, name):
    new_project(tmp_path / "new", {"images": str(images), "family": name})
    sections = Project(tmp_path / "new").config.sections
    for section, settings in family(name).begin.items():
        assert {key: getattr(sections[section], key) for key in settings} == settings
    own = family(name).begin.get("train", {})
    assert sections["train"].steps == own.get("steps", 1500)
    assert sections["samples"].checkpoints == "all"


def test_a_family_that_was_trained_small_is_asked_for_small_pictures():
    begin = family("micro").begin
    assert max(begin["buckets"]["resolutions"]) == begin["samples"]["width"] == begin["samples"]["height"] <= 192
