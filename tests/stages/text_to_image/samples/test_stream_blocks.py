"""[samples] stream_blocks: a base on disk draws the same pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stages.text_to_image.samples.stage import STAGE
from tests.stages.text_to_image.samples.previews import CONFIG, context


@pytest.mark.parametrize("bits", [16, 4])
def test_a_base_on_disk_draws_the_same_pictures_and_leaves_no_file(bits: Any, root: Path, tmp_path: Path) -> None:
    pictures = []
    for streamed in (False, True):
        config = replace(CONFIG, checkpoints="last", seeds=(0,), base_bits=bits, stream_blocks=streamed)
        run = context(root, tmp_path / str(streamed), config)
        rows = [row for batch in STAGE.run(run) for row in batch.to_pylist()]
        pictures.append([np.array(Image.open(run.output.artifacts / row["path"])) for row in rows])
    kept, read = pictures
    assert len(kept) == len(read) == 4
    assert all(np.array_equal(a, b) for a, b in zip(kept, read, strict=True))
    assert not (tmp_path / "True" / "streamed").exists()
