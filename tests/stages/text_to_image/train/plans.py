"""Memory plans and estimates of test runs."""

from __future__ import annotations

from typing import Any

from stages.models.flux2.transformer import Flux2Config
from stages.models.folders import read_config
from stages.text_to_image.train import memory_plan
from stages.text_to_image.train.config import TrainConfig
from stages.tuner.memory_plan import GB, MemoryPlan
from tests.stages.text_to_image.train.runs import (
    TINY,
    Run,
)

PIXELS = TINY.architecture.pixels_per_token


def chosen(run: Run, start: Any = None) -> MemoryPlan:
    return run.task().memory_plan(start)


def estimator(config: TrainConfig, sizes: Any) -> memory_plan.MemoryEstimator:
    return memory_plan.MemoryEstimator(config, TINY.architecture, Flux2Config.from_dict(sizes))


def batch_of(run: Run) -> memory_plan.BatchShape:
    return memory_plan.largest_batch(run.task().sampler, PIXELS)


def needs(run: Run, plan: Any, samples: int = 2) -> float:
    """GB."""
    return estimator(run.config, read_config(run.transformer)).estimate(batch_of(run), samples).peak(plan) / GB
