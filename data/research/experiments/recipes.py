"""Compare our recipe with the defaults of other trainers: train data/projects/example with each, draw all prompts, score them.

    python -m data.research.experiments.recipes OUT [--seeds 3] [--steps 300] [--only PATTERN] [--workers N]
    python -m data.research.experiments.recipes OUT --example [--seeds 3]

adds one JSON line per run to the file OUT, and prints the means over the seeds with 95 % intervals. Runs that OUT has already are
left out, so a stopped experiment goes on. The recipes
are in recipes.toml. All runs train on the same number of samples: --steps times the batch of data/projects/example. A batch of
one
therefore takes four times as many steps. With --example, data/projects/example runs as it is, and no other recipe.

The learning rates of other trainers are made for the released models. A model as small as micro needs about thirty times as
much: data/projects/example has 30 times our own default. So each of these recipes runs as it is, and with 30 times its rate.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import logging
import shutil
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data import EXAMPLE
from data.research.experiments.agreement import with_agreement
from data.research.experiments.in_memory import MemoryTables
from data.research.experiments.processes import run_all
from pipeline.commands.text_to_image.evaluate import Row, auc, group_rows, pair_by_prompt, values
from pipeline.project.project import Project
from stages.intervals import PERCENTILES, RESAMPLES

LOG = logging.getLogger("recipes")
RATE = 30  # the learning rate of data/projects/example over the default
BEFORE = ("images", "captions", "buckets", "latents", "embeddings")
COLUMNS = ("style", "real", "agreement")

Settings = dict[str, Any]


def recipes(steps: int) -> dict[str, Settings]:
    """Return the settings of each recipe by its name. `steps` is the number of steps with the batch of data/projects/example."""
    found = {}
    facts = tomllib.loads(Path(__file__).with_name("recipes.toml").read_text())
    for recipe in facts["recipe"]:
        settings = facts["common"] | {key: value for key, value in recipe.items() if "." in key}
        found[recipe["name"]] = at_length(settings, steps)
        if recipe.get("rival"):
            found[f"{recipe['name']}, rate x {RATE}"] = at_length(settings | {"train.lr": settings["train.lr"] * RATE}, steps)
    return found


def at_length(settings: Settings, steps: int) -> Settings:
    """Return `settings` with the number of steps added, so that the run trains on as many samples as `steps` steps of
    data/projects/example do. If the learning rate falls, its number of steps is added too.
    """
    example = Project(EXAMPLE).config.sections["train"]
    length = steps * example.batch_size // settings.get("train.batch_size", example.batch_size)
    schedule = dict(settings.get("train.schedule", {"shape": "cosine", "warmup_steps": example.schedule.warmup_steps}))
    if schedule.get("shape", "constant") != "constant":
        schedule["decay_steps"] = length - schedule["warmup_steps"]
    return settings | {"train.steps": length, "train.checkpoint_every": length, "train.schedule": schedule}


class Bench:
    """What all runs of the experiment share: the tables of data/projects/example before `train`, and the pictures of the base
    model.
    Artifacts are written below `folder`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tables = MemoryTables(folder / "before")
        for name in BEFORE:
            self.tables.run(Project(EXAMPLE), name)
        self.base: dict[str, MemoryTables] = {}  # settings of [samples] as JSON -> tables with the base's pictures

    def run(self, settings: Settings) -> dict[str, Any]:
        """Train with `settings`, draw all prompts, score the pictures, and return the measurements as a dict. It has the
        entries of `measure`, the mean loss of the last fifth of the samples, and the seconds of the run.
        """
        began = time.monotonic()
        tables = self.train(settings)
        losses = tables.rows["train"]["loss"].to_numpy()
        trained = time.monotonic()
        found = self.score(tables, settings)
        shutil.rmtree(tables.folder)
        seconds = {"train_seconds": round(trained - began, 1), "seconds": round(time.monotonic() - began, 1)}
        return found | {"loss": round(float(losses[-len(losses) // 5 :].mean()), 4), "samples": len(losses)} | seconds

    def train(self, settings: Settings) -> MemoryTables:
        """Train with `settings`, and return the tables with the table `train`. Their folder holds the checkpoints."""
        tables = self.tables.branch(Path(tempfile.mkdtemp(dir=self.folder)))
        tables.run(Project(EXAMPLE, settings), "train")
        return tables

    def score(self, tables: MemoryTables, settings: Settings) -> dict[str, Any]:
        """Draw all prompts with a trained adapter of `tables`, score the pictures, and return the measurements (see `measure`).
        [samples] `checkpoints` in `settings` chooses the adapter, by default the last.
        """
        drawing = {key: value for key, value in settings.items() if key.startswith("samples.")} | {"samples.first_prompts": 0}
        drawn = tables.run(Project(EXAMPLE, settings | drawing | {"samples.base": False}), "samples")
        base = self._base({key: value for key, value in drawing.items() if key != "samples.checkpoints"})
        shutil.copytree(base.files["samples"], tables.files["samples"], dirs_exist_ok=True)
        tables.rows["samples"] = pa.concat_tables([base.rows["samples"], drawn])
        project = Project(EXAMPLE, settings | drawing)
        rows = tables.run(project, "scores").to_pylist()
        trigger = project.config.sections["captions"].trigger
        return measure(with_agreement(rows, tables.files["samples"], EXAMPLE / "references", trigger))

    def _base(self, drawing: Settings) -> MemoryTables:
        """Return tables with the base's pictures of all prompts, drawn with the settings `drawing` of [samples]."""
        key = json.dumps(drawing, sort_keys=True)
        if key not in self.base:
            self.base[key] = self.tables.branch(self.folder / f"base-{len(self.base)}")
            self.base[key].run(Project(EXAMPLE, drawing), "samples")
        return self.base[key]


def measure(rows: list[Row]) -> dict[str, Any]:
    """Return the measurements of a run as a dict. `rows` are its rows of the table `scores`, with their agreement.

    "style" and "real" are AUCs of the adapter's pictures against the base's. "agreement" is the adapter's mean agreement with the
    prompts minus the base's, and "agreement_real" is that of real pictures. The recalls (R@10) are of the adapter, the base and
    real pictures. "scores" has the values of every prompt: column -> [[base, adapter], ...].
    """
    groups = group_rows(rows)
    adapter = next(name for name in groups if name not in ("base", "real"))
    found: dict[str, Any] = {"scores": {}}
    for column in COLUMNS:
        pairs = pair_by_prompt(groups["base"], groups[adapter], column)
        base, other = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
        found[column] = round(float(other.mean() - base.mean()) if column == "agreement" else auc(base, other), 4)
        found["scores"][column] = [[round(float(x), 4) for x in (one[0], two[0])] for one, two in pairs]
    for name, key in ((adapter, "recall"), ("base", "recall_base"), ("real", "recall_real")):
        found[key] = round(float(np.mean(values(groups[name], "agreement_rank") <= 10)), 3)
    real, base = (values(groups[name], "agreement").mean() for name in ("real", "base"))
    found["agreement_real"] = round(float(real - base), 4)
    return found


@dataclass(frozen=True)
class Interval:
    """The mean of a score over several seeds, and the ends `low` and `high` of its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def interval(rows: list[dict[str, Any]], column: str) -> Interval:
    """Return the mean of a score over several runs, with a 95 % bootstrap interval. `rows` are the runs, which differ only
    in their seed. `column` is the name of the score, one of `COLUMNS`. The bootstrap resamples both the seeds and the
    prompts.
    """
    pairs_SP2 = np.array([row["scores"][column] for row in rows])
    base_SP, adapter_SP = pairs_SP2[..., 0], pairs_SP2[..., 1]
    gain_SPP = adapter_SP[:, :, None] - base_SP[:, None]  # a mean of these pairs is a difference of means
    if column != "agreement":
        gain_SPP = (np.sign(gain_SPP) + 1) / 2  # a mean of these is an AUC
    seeds_RS, counts_RP = _resamples(*base_SP.shape)
    value_RS = np.einsum("rp,spq,rq->rs", counts_RP, gain_SPP, counts_RP, optimize=True) / base_SP.shape[1] ** 2
    drawn_R = np.take_along_axis(value_RS, seeds_RS, axis=1).mean(1)
    low, high = np.percentile(drawn_R, PERCENTILES)
    return Interval(float(gain_SPP.mean()), float(low), float(high))


@functools.cache
def _resamples(seeds: int, prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw `RESAMPLES` bootstrap samples of `seeds` training seeds and `prompts` prompts. Return the pair (seeds_RS,
    counts_RP). Row r of seeds_RS holds the indices of the seeds in sample r. Row r of counts_RP holds how often each prompt
    occurs in sample r.
    """
    draw = np.random.default_rng(0)
    drawn = [(draw.integers(0, seeds, seeds), draw.integers(0, prompts, prompts)) for _ in range(RESAMPLES)]
    counts = [np.bincount(chosen, minlength=prompts) for _, chosen in drawn]
    return np.array([chosen for chosen, _ in drawn]), np.array(counts, np.float64)


def read_rows(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the runs in a file of this experiment as a dict from recipe to rows. There is one row per seed, in the order
    of the file.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        row = json.loads(line)
        found.setdefault(row["recipe"], []).append(row)
    return found


_BENCH: list[Bench] = []  # the bench of this worker process


def _work(row: dict[str, Any], folder: str) -> dict[str, Any]:
    if not _BENCH:
        _BENCH.append(Bench(Path(tempfile.mkdtemp(dir=folder))))
    return row | _BENCH[0].run(row["set"] | {"train.seed": row["seed"]})


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="steps with the batch of data/projects/example")
    parser.add_argument("--example", action="store_true", help="run data/projects/example as it is instead")
    parser.add_argument("--only", default="*", help="names of recipes, with wildcards")
    parser.add_argument("--workers", type=int, default=1, help="processes; more than one helps on a GPU")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    done = {(name, row["seed"]) for name, rows in read_rows(asked.out).items() for row in rows}
    chosen = {"data/projects/example": {}} if asked.example else recipes(asked.steps)
    todo = [
        {"recipe": name, "seed": seed, "set": settings}
        for seed in range(asked.seeds)
        for name, settings in chosen.items()
        if fnmatch.fnmatch(name, asked.only) and (name, seed) not in done
    ]
    for row in run_all(_work, todo, asked.out, asked.workers):
        LOG.info("%s, seed %d: %s", row["recipe"], row["seed"], ", ".join(f"{name} {row[name]:.3f}" for name in COLUMNS))
    for name, rows in read_rows(asked.out).items():
        if fnmatch.fnmatch(name, asked.only):
            LOG.info("%s, %d seeds: %s", name, len(rows), ", ".join(f"{each} {interval(rows, each)}" for each in COLUMNS))


if __name__ == "__main__":
    main()
