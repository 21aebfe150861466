"""What each stage computes. `PIPELINES` is the table of contents."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from stages import blas

if TYPE_CHECKING:
    from stages.stage import Stage

BLAS = blas.load()  # before anything here imports mlx.core

PIPELINES: dict[str, tuple[str, ...]] = {
    "lora": ("images", "captions", "buckets", "latents", "embeddings", "train", "samples", "scores"),
}


def find(stage_name: str) -> Stage:
    """The stage that writes the table of that name."""
    found: Stage = import_module(f"stages.text_to_image.{stage_name}").STAGE
    assert found.writes.name == stage_name
    return found
