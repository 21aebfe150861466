"""Fixtures for the tests of the stage samples."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from schemas.text_to_image import TRAIN
from stages.models.flux2.transformer import Flux2Config
from stages.tuner import checkpoint
from stages.tuner.adapters import lora
from stages.tuner.adapters.targets import fresh_adapter, select_targets
from tests.harness import writer_into
from tests.stages.text_to_image.samples.previews import TINY


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights of the tiny family, and a training run with the checkpoints of steps 10 and 20."""
    folder = tmp_path_factory.mktemp("samples")
    TINY.architecture.write_random_weights(folder / "weights", TINY, 0)
    shapes = Flux2Config.from_dict(TINY.transformer).shapes()
    linears = {n.removesuffix(".weight"): s for n, s in shapes.items() if "transformer_blocks" in n and len(s) == 2}
    targets = select_targets(linears, ["*"], 2, 4.0)

    for step in (10, 20):
        arrays = {n: a if n.endswith(lora.A) else 0.2 * mx.ones_like(a) for n, a in fresh_adapter(targets, step).items()}
        checkpoint.save(
            writer_into(folder / "train"), step, arrays, {}, TRAIN.batch.empty_table(), {"rank": "2", "alpha": "4.0"}, {}
        )
    return folder
