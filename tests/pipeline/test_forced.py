"""Runs against the memory plan: a stage that the plan refuses exceeds the budget when it is forced to run, and a stage that
the plan accepts stays within it. MLX counts the peaks.
"""

from __future__ import annotations

import gc
from pathlib import Path

import mlx.core as mx
import pytest

from pipeline.project.outlook import forecast, outlook
from pipeline.project.project import Project
from stages.tuner.blockwise import device
from tests import projects

MARGIN = 1.3  # between a budget and the estimate, either way
PLENTY = 10**11
STAGES = ("latents", "embeddings", "train", "samples")


def give(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    monkeypatch.setattr(device, "memory_budget", lambda limit_gb=None: budget)
    for name in ("text_to_image.embeddings.stage", "tuner.memory"):
        monkeypatch.setattr(f"stages.{name}.memory_budget", lambda limit_gb=None: budget)


def peak_of(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes."""
    gc.collect()
    mx.clear_cache()
    before, set_limit = mx.get_active_memory(), mx.set_memory_limit
    mx.reset_peak_memory()
    with monkeypatch.context() as patch:
        # What earlier tests left behind counts too: near its limit, MLX waits after each operation, and the peak is lower.
        patch.setattr(mx, "set_memory_limit", lambda limit: set_limit(limit + before) - before)
        projects.build(folder, name)
    return mx.get_peak_memory() - before


def test_what_is_refused_exceeds_the_budget_when_forced_and_what_is_accepted_stays_within_it(tmp_path, tiny_weights, monkeypatch):
    folder = projects.make(tmp_path / "p", tiny_weights, images=2)
    for old, new in (
        ("resolutions = [64, 96]", "resolutions = [192]\nupscale = true"),
        ("width = 64\nheight = 64", "width = 192\nheight = 192"),
    ):
        projects.edit(folder, old, new)
    projects.build(folder, "images", "captions", "buckets")
    for name in STAGES:
        least = forecast(Project(folder), name, outlook(Project(folder), 1)).peak
        give(monkeypatch, int(least / MARGIN))
        with pytest.raises(ValueError, match="more than the"):
            projects.build(folder, name)
        give(monkeypatch, int(least * MARGIN))
        peak = peak_of(folder, name, monkeypatch)
        assert least / MARGIN < peak <= least * MARGIN, (name, least, peak)


@pytest.mark.parametrize("side", [64, 192])
def test_disk_is_forecast_within_two_percent_of_what_the_tables_take(tmp_path, tiny_weights, side):
    folder = projects.make(tmp_path / "p", tiny_weights, images=4)
    projects.edit(folder, "commit_seconds = 0.0", "commit_seconds = 3600.0")  # a file for every commit
    projects.edit(folder, "resolutions = [64, 96]", f"resolutions = [{side}]\nupscale = true")
    projects.edit(folder, "[embeddings]", '[embeddings]\nstored = "int8"')
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings")
    project = Project(folder)
    for name in ("latents", "embeddings"):
        taken = project.current(name).manifest()["bytes"]
        assert projects.planned(project)[name].disk == pytest.approx(taken, rel=0.02), name
