"""Runs against the memory plan: a stage that the plan refuses exceeds the budget when it is forced to run, and a stage that
the plan accepts stays within it. MLX counts the peaks.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from pipeline.project.outlook import forecast, need, outlook
from pipeline.project.project import Project
from stages.tuner.blockwise import device
from tests import projects

ALONE = "LATENTMILL_TEST_ALONE"  # set in the process that measures
MARGIN = 1.3  # between a budget and the estimate, either way
PLENTY = 10**11
STAGES = ("latents", "embeddings", "train", "samples")


def give(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """Set the memory budget of every stage to `budget` bytes."""
    monkeypatch.setattr(device, "memory_budget", lambda limit_gb=None: budget)
    for name in ("text_to_image.embeddings.stage", "tuner.memory"):
        monkeypatch.setattr(f"stages.{name}.memory_budget", lambda limit_gb=None: budget)


def peak_of(folder: Path, name: str) -> int:
    """Run the stage `name`, and return the peak of its memory in bytes."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    projects.build(folder, name)
    # What earlier tests left behind may be released during the run.
    return mx.get_peak_memory() - min(before, mx.get_active_memory())


def test_what_is_refused_exceeds_the_budget_when_forced_and_what_is_accepted_stays_within_it(
    request, tmp_path, tiny_weights, monkeypatch
):
    if not os.environ.get(ALONE):  # peaks of some hundred kB depend on what earlier tests of the process did
        words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", request.node.nodeid]
        done = subprocess.run(words, cwd=projects.ROOT, env=os.environ | {ALONE: "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        return
    folder = projects.make(tmp_path / "p", tiny_weights, images=2)
    for old, new in (
        ("resolutions = [64, 96]", "resolutions = [256]\nupscale = true"),
        ("width = 64\nheight = 64", "width = 512\nheight = 512"),
    ):
        projects.edit(folder, old, new)
    projects.build(folder, "images", "captions", "buckets")
    for name in STAGES:
        least = forecast(Project(folder), name, outlook(Project(folder), 1)).peak
        give(monkeypatch, int(least / MARGIN))
        with pytest.raises(ValueError, match="more than the"):
            projects.build(folder, name)
        give(monkeypatch, int(least * MARGIN))
        peak = peak_of(folder, name)
        assert least / MARGIN < peak <= least * MARGIN, (name, least, peak)


@pytest.mark.parametrize("side", [64, 512])
def test_disk_is_forecast_within_two_percent_of_what_the_tables_take(tmp_path, tiny_weights, side):
    folder = projects.make(tmp_path / "p", tiny_weights, images=4)
    projects.edit(folder, "commit_seconds = 0.0", "commit_seconds = 3600.0")  # a file for every commit
    projects.edit(folder, "resolutions = [64, 96]", f"resolutions = [{side}]\nupscale = true")
    projects.edit(folder, "[embeddings]", '[embeddings]\nstored = "int8"')
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings")
    project = Project(folder)
    for name in ("latents", "embeddings"):
        taken = project.current(name).manifest()["bytes"]
        assert need(project, name, outlook(project)).disk == pytest.approx(taken, rel=0.02), name
