"""Memory plans and estimates of test runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stages.memory import GB
from stages.models.flux2.transformer import Flux2Config
from stages.models.folders import read_config
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.memory import BatchShape, ImageEstimator, largest_batch
from stages.tuner import step as tuner_step
from stages.tuner.memory import MemoryPlan, choose_plan
from tests.stages.text_to_image.train.runs import TINY, Run

PIXELS = TINY.architecture.pixels_per_token


def chosen(run: Run, start: Any = None) -> MemoryPlan:
    return choose_plan(run.task().estimator(), start, run.said.append)


def estimator(config: TrainConfig, sizes: Any, batch: BatchShape) -> ImageEstimator:
    return ImageEstimator(config, TINY.architecture, Flux2Config.from_dict(sizes), batch)


def batch_of(run: Run) -> BatchShape:
    return largest_batch(run.task().sampler, PIXELS)


def needs(run: Run, plan: Any, samples: int = 2) -> float:
    """GB."""
    return estimator(run.config, read_config(run.transformer), batch_of(run)).blocks(samples).memory(plan).peak / GB


def noted(monkeypatch: pytest.MonkeyPatch, note: Callable[..., Any], name: str = "loss_and_grads") -> list[Any]:
    """What `note` makes of the arguments whenever a step calls this function of its own."""
    seen: list[Any] = []
    real = getattr(tuner_step, name)
    monkeypatch.setattr(tuner_step, name, lambda *given: [seen.append(note(*given)), real(*given)][1])
    return seen
