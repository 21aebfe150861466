"""What tests of training share; a file that needs another transformer, or another whole run, has its own under that name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stages.text_to_image.train.runs import Run, weights


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a tiny transformer."""
    return weights(tmp_path_factory.mktemp("weights") / "transformer")


@pytest.fixture(scope="module")
def whole(transformer: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An unbroken run of BASE."""
    return Run(tmp_path_factory.mktemp("whole"), transformer).go()
