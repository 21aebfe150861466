"""What each stage computes: one folder per pipeline, the models and the tuner that they share, the contracts in stage.py.

A pipeline imports no other pipeline. `models` and `tuner` import neither a pipeline nor a schema. Nothing imports `pipeline`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from stages import blas, footprint

if TYPE_CHECKING:
    from stages.pipelines import Pipeline

BLAS = blas.load()  # before anything here imports mlx.core
footprint.gpu()  # likewise

PIPELINES: dict[str, str] = {"text_to_image": "stages.text_to_image", "retrieval": "stages.retrieval"}


def pipeline(name: str) -> Pipeline:
    """`name`: a key of PIPELINES, or the dotted name of a module that defines PIPELINE. Raises ValueError."""
    module = PIPELINES.get(name, name)
    if module == name and ("." not in name or not all(part.isidentifier() for part in name.split("."))):
        raise ValueError(f"must be one of {', '.join(PIPELINES)} or a dotted module name, got {name!r}")
    try:
        found: Pipeline = import_module(module).PIPELINE
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"{name!r} is not the module of a pipeline: {error}") from None
    return found
