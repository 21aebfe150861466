"""Where the held-out loss and the pictures part: train data/example for long, and score its checkpoints.

    python -m data.experiments.stopping OUT [--seeds 3] [--steps 3600] [--points 8] [--workers N]

adds one JSON line per seed to the file OUT, and prints the means over the seeds. Seeds that OUT has already are left out. Four
images of the example are held out. At equal distances, the run measures their loss and keeps a checkpoint, and all prompts of the
example are drawn with each checkpoint and scored.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from data.experiments.recipes import COLUMNS, EXAMPLE, Bench, Settings, interval
from data.experiments.tables import markdown
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


def run(bench: Bench, chosen: Settings) -> list[Row]:
    """Train with the settings `chosen`, and return one row per checkpoint: its step, its loss of held-out images, and its scores
    (`data.experiments.recipes.measure`).
    """
    tables = bench.train(chosen)
    measured = [row for row in tables.rows["train"].to_pylist() if row["split"] == "validation"]
    rows = []
    for step in range(chosen["train.checkpoint_every"], chosen["train.steps"] + 1, chosen["train.checkpoint_every"]):
        losses = [row["loss"] for row in measured if row["step"] == step]
        scores = bench.score(tables, chosen | {"samples.checkpoints": [step]})
        rows.append({"step": step, "held_out_loss": round(float(np.mean(losses)), 4)} | scores)
    shutil.rmtree(tables.folder)
    return rows


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file of this experiment, one per seed."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(rows: list[Row]) -> str:
    """Return the table in Markdown: one line per checkpoint, with means over the seeds and 95 % intervals."""
    lines = []
    for points in zip(*(row["points"] for row in rows), strict=True):
        losses = [point["held_out_loss"] for point in points]
        loss = f"{np.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
        lines.append((str(points[0]["step"]), loss, *(str(interval(list(points), column)) for column in COLUMNS)))
    return markdown(HEAD, lines)


_BENCH: list[Bench] = []  # the bench of this worker process


def _work(row: Row, folder: str) -> Row:
    if not _BENCH:
        _BENCH.append(Bench(Path(tempfile.mkdtemp(dir=folder))))
    return row | {"points": run(_BENCH[0], row["set"])}


def main() -> None:
    """Run the experiment and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--points", type=int, default=8, help="checkpoints, at equal distances")
    parser.add_argument("--workers", type=int, default=1, help="processes; more than one helps on a GPU")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    done = {row["seed"] for row in read_rows(asked.out)}
    todo = [{"seed": seed, "set": settings(asked.steps, asked.points, seed)} for seed in range(asked.seeds) if seed not in done]
    with (
        tempfile.TemporaryDirectory() as folder,
        asked.out.open("a") as out,
        ProcessPoolExecutor(asked.workers, multiprocessing.get_context("spawn")) as pool,
    ):
        for ended in as_completed([pool.submit(_work, row, folder) for row in todo]):
            row = ended.result()
            out.write(json.dumps(row) + "\n")
            out.flush()
            LOG.info("seed %d: held-out loss %s", row["seed"], [point["held_out_loss"] for point in row["points"]])
    LOG.info("%s", table(read_rows(asked.out)))


if __name__ == "__main__":
    main()
