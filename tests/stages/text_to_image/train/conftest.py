"""What tests of training share; a file that needs another transformer, or another whole run, has its own under that name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stages.text_to_image.train.runs import Run, weights


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weights(tmp_path_factory.mktemp("weights") / "transformer")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weights(tmp_path_factory.mktemp("wide") / "transformer", attention_head_dim=32, axes_dims_rope=(8, 8, 8, 8))


@pytest.fixture(scope="module")
def whole(transformer: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("whole"), transformer).go()


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_layers": 2, "num_single_layers": 4, "num_attention_heads": 4, "attention_head_dim": 32}
    return weights(tmp_path_factory.mktemp("deep") / "transformer", **sizes, axes_dims_rope=(8, 8, 8, 8))
