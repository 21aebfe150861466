"""A finished project of the pipeline retrieval, with the random weights of the family tiny."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.stages.retrieval.project import INDEXED, make, run


@pytest.fixture(scope="session")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make(tmp_path_factory.mktemp("indexed") / "project", verbs=6, things=5)
    run(folder, *INDEXED)
    return folder


@pytest.fixture
def folder(indexed: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(indexed, tmp_path / "project", symlinks=True))
