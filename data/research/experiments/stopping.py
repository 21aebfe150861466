"""Find where held-out loss and picture quality disagree: train data/projects/example for long, and score the checkpoints.

    python -m data.research.experiments.stopping OUT [--seeds 3] [--steps 3600] [--points 8] [--workers N] [--page PAGE]

adds one JSON line per seed and checkpoint to the file OUT, and prints the means over the seeds. Checkpoints that OUT
already has are not scored again. Four images of the example are held out. At equal distances, the run measures their loss
and keeps a checkpoint. All prompts of the example are drawn with each checkpoint and scored. With --page, nothing is
trained: the table in the file PAGE, which is data/docs/checkpoints.md, is replaced.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data import EXAMPLE
from data.research.experiments.processes import append, call_all
from data.research.experiments.recipes import COLUMNS, Bench, Settings, interval
from data.research.experiments.report import with_table
from data.research.experiments.tables import markdown
from pipeline.project.project import Project

LOG = logging.getLogger("stopping")
HELD = ("avocado.webp", "fire-truck.webp", "guitar.webp", "mushroom.webp")
HEAD = ("step", "loss of held-out images", "style", "nearness to real pictures", "agreement less the base's")

Row = dict[str, Any]


def settings(steps: int, points: int, seed: int) -> Settings:
    """Return the settings of a run of `steps` steps. It measures the held-out images and keeps a checkpoint `points` times."""
    every = steps // points
    schedule = Project(EXAMPLE).config.sections["train"].schedule
    return {
        "train.steps": steps,
        "train.seed": seed,
        "train.schedule.decay_steps": steps - schedule.warmup_steps,
        "train.checkpoint_every": every,
        "train.validation.paths": list(HELD),
        "train.validation.every": every,
    }


def run(bench: Bench, chosen: Settings, known: set[int]) -> Iterator[Row]:
    """Train with the settings `chosen`, and yield one row per checkpoint. A row has the seed, the step, the loss of the
    held-out images, and the scores of `data.research.experiments.recipes.measure`. `bench` holds the tables before training.
    `known`
    has the steps whose checkpoints are left out.
    """
    tables = bench.train(chosen)
    measured = [row for row in tables.rows["train"].to_pylist() if row["split"] == "validation"]
    every = chosen["train.checkpoint_every"]
    for step in range(every, chosen["train.steps"] + 1, every):
        if step not in known:
            losses = [row["loss"] for row in measured if row["step"] == step]
            scores = bench.score(tables, chosen | {"samples.checkpoints": [step]})
            yield {"seed": chosen["train.seed"], "step": step, "held_out_loss": round(float(np.mean(losses)), 4)} | scores
    shutil.rmtree(tables.folder)


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file of this experiment, one per seed and checkpoint."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(rows: list[Row]) -> str:
    """Return the table in Markdown: one line per checkpoint, with means over the seeds and 95 % intervals."""
    lines = []
    for step in sorted({row["step"] for row in rows}):
        points = [row for row in rows if row["step"] == step]
        losses = [point["held_out_loss"] for point in points]
        loss = f"{np.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
        lines.append((str(step), loss, *(str(interval(points, column)) for column in COLUMNS)))
    return markdown(HEAD, lines)


def _work(job: Row, folder: str) -> None:
    """Run one seed. Append the row of each checkpoint to the file `job["out"]` as soon as it is scored. `job["set"]` has the
    settings, and `job["known"]` the steps to leave out. Files are written below `folder`.
    """
    for row in run(Bench(Path(tempfile.mkdtemp(dir=folder))), job["set"], job["known"]):
        append(job["out"], row)


def main() -> None:
    """Run the experiment and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--points", type=int, default=8, help="checkpoints, at equal distances")
    parser.add_argument("--workers", type=int, default=1, help="processes; more than one helps on a GPU")
    parser.add_argument("--page", type=Path, help="train nothing: write the table of OUT into this page")
    asked = parser.parse_args()
    if asked.page:
        asked.page.write_text(with_table(asked.page.read_text(), "stopping", table(read_rows(asked.out))))
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    todo = []
    for seed in range(asked.seeds):
        known = {row["step"] for row in read_rows(asked.out) if row["seed"] == seed}
        if len(known) < asked.points:
            todo.append({"set": settings(asked.steps, asked.points, seed), "known": known, "out": asked.out})
    for _ in call_all(_work, todo, asked.workers):
        pass
    LOG.info("%s", table(read_rows(asked.out)))


if __name__ == "__main__":
    main()
