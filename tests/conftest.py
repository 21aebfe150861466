"""Loads the BLAS before MLX, keeps every test off the network, and makes the tiny weights once."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import stages  # noqa: F401  (before mlx.core)


@pytest.fixture(scope="session")
def tiny_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny family's weights; read only."""
    from stages.models.flux2 import tiny

    folder = tmp_path_factory.mktemp("tiny") / "weights"
    tiny.make(folder, seed=0)
    return folder
