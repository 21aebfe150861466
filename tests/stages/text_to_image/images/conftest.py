"""Fixtures for the tests of the stage images."""

import pytest

from stages.text_to_image.images import stage as images
from tests.stages.text_to_image.images.folders import Project


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.fixture
def probed(monkeypatch):
    calls, real = [], images.probe

    def counting(file, max_pixels):
        calls.append(file.name)
        return real(file, max_pixels)

    monkeypatch.setattr(images, "probe", counting)
    return calls
