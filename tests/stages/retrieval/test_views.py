"""The stored questions of the pipeline, asked about the rows of a real training run."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from pipeline import Project
from tests.stages.retrieval.project import rows, run

TRAINING = {
    "train.steps": 6,
    "train.lr": 0.02,
    "train.batch_size": 4,
    "train.validation": {"every": 3},
}


@pytest.fixture(scope="module")
def trained(indexed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "project"
    shutil.copytree(indexed, folder, symlinks=True)
    run(folder, "negatives", "train", overrides=TRAINING)
    return folder


def panel(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = Project(folder, TRAINING).panel(name).to_pylist()
    return found


def test_the_validation_panel_is_the_mean_reciprocal_rank_by_step(trained):
    ranks = defaultdict(list)
    for row in rows(trained, "train", TRAINING):
        if row["split"] == "validation":
            ranks[row["step"]].append(row["rank"])
    found = panel(trained, "validation")
    assert [row["step"] for row in found] == sorted(ranks) and len(found) >= 2
    for row in found:
        each = ranks[row["step"]]
        assert row["mrr"] == pytest.approx(sum(1 / rank for rank in each) / len(each)) and row["pairs"] == len(each)
