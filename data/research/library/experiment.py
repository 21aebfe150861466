"""Tune retriever-micro to a library, and compare it with the base on functions that the tuning has not seen.

    python -m data.research.library.experiment prepare TABLES [--root package:NAME]      # read the library; needs the whole
    program
    python -m data.research.library.experiment run TABLES OUT [--seeds 3] [--workers 4]  # train and rank; needs MLX and pyarrow
    python -m data.research.library.experiment report OUT

`prepare` writes the tables of a project into the folder TABLES. `run` adds one JSON line per recipe and strength to the file OUT
as soon as it is measured, and leaves out runs that OUT has already. `report` prints what OUT says. No table of the project is
written, so a GPU machine needs no Lance.

Recipe and strength are chosen by MRR@10 on the validation queries. A strength below 1 uses only that share of the adapter's
change of the weights. Then the chosen recipe is trained once per seed. The test queries are read for these runs and the base.
With `--keep FOLDER`, adapters are kept there, and none of them is trained twice.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import logging
import math
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from data import PROJECTS
from data.research.experiments.in_memory import MemoryTables
from data.research.library import by_mlx, by_torch
from data.research.library.report import STRENGTHS, Row, best_recipe, read, reciprocal, report
from pipeline.project.project import Project
from pipeline.project.stage_run import ArrayReader
from schemas.retrieval import TOKENS
from stages.retrieval.search import measures

LOG = logging.getLogger("library")
SPLITS = ("valid", "test")
BEFORE = ("sources", "units", "pairs", "tokens", "negatives")
CARRIED = ("pairs", "tokens", "negatives")  # what training and evaluation read
MOST = 4  # hard negatives of a pair in the tables, for the recipes that use them

NEAR: Row = {"train.batch_size": 256, "train.loss": {"temperature": 0.04, "symmetric": True}}  # as the base was trained
RECIPES: dict[str, Row] = {
    "as in project.toml": {},
    "lr 5e-4": {"train.lr": 5e-4},
    "batch 256": NEAR | {"train.steps": 300},
    "batch 256, lr 5e-4": NEAR | {"train.steps": 300, "train.lr": 5e-4},
    "batch 256, lr 2e-4": NEAR | {"train.steps": 300, "train.lr": 2e-4},
    "batch 256, 600 steps": NEAR | {"train.lr": 5e-4},
    "batch 256, rank 64": NEAR | {"train.steps": 300, "train.lr": 5e-4, "train.rank": 64, "train.alpha": 128.0},
    "batch 256, no head": NEAR | {"train.steps": 300, "train.lr": 5e-4, "train.full": []},
    "batch 256, EMA": NEAR | {"train.steps": 300, "train.ema": {"decay": 0.98}},
    "batch 128, 2 hard negatives": NEAR | {"train.lr": 5e-4, "train.batch_size": 128, "train.hard_negatives": 2},
}


def prepare(project: Path, folder: Path, root: str = "") -> None:
    """Run the stages before `train` in memory, and write the tables that training reads into `folder`. `project` is the folder
    of the project. `root` replaces its `[sources] roots`: a folder, or "package:NAME" for an installed package.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings: Row = {"negatives.count": MOST} | ({"sources.roots": [root]} if root else {})
    with tempfile.TemporaryDirectory() as work:
        tables = MemoryTables(Path(work))
        for name in BEFORE:
            LOG.info("%s: %d rows", name, len(tables.run(Project(project, settings), name)))
    for name in CARRIED:
        parquet.write_table(tables.rows[name], folder / f"{name}.parquet", compression="zstd")


def load(folder: Path, work: Path) -> MemoryTables:
    """Return the tables that `prepare` wrote into `folder`. Stages that run on them write artifacts below `work`."""
    tables = MemoryTables(work)
    tables.rows = {name: parquet.read_table(folder / f"{name}.parquet") for name in CARRIED}
    return tables


def train(tables: MemoryTables, project: Project) -> tuple[Path, pa.Table]:
    """Train with the settings of `project`. Return the path of the adapter file and the rows of the table `train`. With
    [train.ema], the file holds the moving average of the adapter.
    """
    from stages.tuner.checkpoint import ADAPTER, EMA

    rows = tables.run(project, "train")
    config: Any = project.config.sections["train"]
    return tables.files["train"] / (EMA if config.ema else ADAPTER), rows


def ranks(
    tables: MemoryTables, project: Project, adapter: Path | None, strength: float, splits: Sequence[str], torch: bool = False
) -> Row:
    """Rank all functions of the library for each query, and return the rank of the right function: split -> list of ranks.
    `splits` names the splits to use, "valid" or "test". The ranks are in the order of `pair_id`, and rank 1 is the best.
    `adapter` is an adapter file, or None for the base. `strength` is the factor of the adapter's change, 0 to 1. If `torch` is
    True, PyTorch computes the vectors and the scores; otherwise MLX does.
    """
    pairs = sorted(tables.rows["pairs"].to_pylist(), key=lambda row: str(row["pair_id"]))
    asked = [(n, row) for n, row in enumerate(pairs) if row["rejected"] is None and row["split"] in splits]
    tokens = ArrayReader(tables.rows["tokens"], TOKENS)
    texts = [tokens.read(row["text_id"]) for row in pairs] + [tokens.read(row["query_id"]) for _, row in asked]
    family: Any = project.family
    base = project.component("encoder")
    vectors = (by_torch.encode if torch else by_mlx.encode)(family, base, adapter, strength, texts)
    scores = (by_torch.maxsim if torch else by_mlx.maxsim)(vectors[len(pairs) :], vectors[: len(pairs)])
    groups: dict[str, list[int]] = {}
    for n, row in enumerate(pairs):
        groups.setdefault(row["duplicate_group"], []).append(n)
    found: Row = {split: [] for split in splits}
    for (own, pair), row in zip(asked, scores, strict=True):
        others = np.array([n for n in groups[pair["duplicate_group"]] if n != own], np.int64)
        found[pair["split"]].append(measures.rank_of(row, own, others))
    return found


def run(
    folder: Path,
    project: Path,
    out: Path,
    seeds: int,
    minutes: float,
    more: dict[str, Row],
    workers: int = 1,
    kept: Path | None = None,
    strength: float | None = None,
    torch: bool = False,
) -> None:
    """Run the whole experiment, and append one row per measurement to the file `out`. First the base and every recipe are
    measured on the validation queries, with seed 0. Then the best recipe is trained with `seeds` seeds, and measured on the
    test queries too. `folder` holds the tables that `prepare` wrote.

    No new recipe begins later than `minutes` after the start. `more` is a dict of recipes to use instead of `RECIPES`; if
    it is empty, `RECIPES` is used. `workers` is the number of runs at a time, each in its own process. Adapters are kept in
    the folder `kept` and not trained again; None keeps none. If `torch` is True, PyTorch ranks instead of MLX.

    With a `strength` nothing is chosen: the only recipe in `more` is trained with each seed, and measured at that strength on
    the test queries alone.
    """
    recipes = more or RECIPES
    ends = time.time() + 60 * minutes
    done = {(row["recipe"], row["seed"]) for row in read(out)}
    job = functools.partial(Job, folder, project, kept=kept, torch=torch)
    fixed = strength is not None
    first = [job("base", 0, {}, 0.0, SPLITS, ends=ends)]
    first += [] if fixed else [job(name, 0, recipes[name], ends=ends) for name in recipes]
    make([each for each in first if (each.recipe, 0) not in done], out, workers)
    if strength is None:
        best, strength = best_recipe([row for row in read(out) if row["recipe"] in recipes])
    else:
        [best] = recipes
    tested = {row["seed"] for row in read(out) if "test" in row and (row["recipe"], row["strength"]) == (best, strength)}
    splits = ("test",) if fixed else SPLITS
    last = [job(best, seed, recipes[best], strength, splits) for seed in range(seeds) if seed not in tested]
    make(last, out, workers)


def make(jobs: list[Job], out: Path, workers: int) -> None:
    """Measure each of `jobs` and append the results to the file `out` as they end. `workers` jobs run at a time."""
    spawned = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    with ProcessPoolExecutor(workers, spawned) if workers > 1 else ThreadPoolExecutor(1) as pool:
        for done in as_completed([pool.submit(measure, job) for job in jobs]):
            for row in done.result():
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                found = ", ".join(f"{split} {reciprocal(row, split).mean():.4f}" for split in SPLITS if split in row)
                shown = f"MRR@10 {found}, loss {row.get('loss')}, {row['samples']} samples, {row['seconds']:.0f} s"
                LOG.info("%-30s x %.2f seed %d: %s", row["recipe"], row["strength"], row["seed"], shown)


@dataclass(frozen=True)
class Job:
    """One run of the experiment. `recipe` is the name of the run's recipe, and `settings` are its project settings.
    `folder` holds the tables that `prepare` wrote, and `project` is the project's folder. `splits` names the queries to rank.
    With a `strength`, only that strength is measured. The run does not begin after the time `ends`, in seconds of
    `time.time()`. `kept` is the folder that adapters are kept in, or None. If `torch` is True, PyTorch ranks.
    """

    folder: Path
    project: Path
    recipe: str
    seed: int
    settings: Row
    strength: float | None = None
    splits: tuple[str, ...] = ("valid",)
    ends: float = math.inf
    kept: Path | None = None
    torch: bool = False

    @property
    def adapter(self) -> Path | None:
        """The file in which the adapter of this run is kept, or None if adapters are not kept. Its name is a digest of the
        recipe's name and settings, the seed and the tables.
        """
        tables = sorted(self.folder.glob("*.parquet"))
        made_of = [self.recipe, self.seed, self.settings, [hashlib.sha256(path.read_bytes()).hexdigest() for path in tables]]
        name = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]
        return self.kept / f"{name}.safetensors" if self.kept else None


def measure(job: Job) -> list[Row]:
    """Train with the settings of `job`, and return one row per strength of the adapter. A row has the ranks of the queries of
    the job's splits, the training loss, and the seconds since the start. After the time `job.ends`, nothing is trained and the
    list is empty.
    """
    began = time.time()
    if began > job.ends:
        return []
    row: Row = {"recipe": job.recipe, "seed": job.seed, "set": job.settings, "samples": 0}
    with tempfile.TemporaryDirectory() as work:
        tables = load(job.folder, Path(work))
        chosen = Project(job.project, at_length(job.project, job.settings | {"train.seed": job.seed}))
        adapter = None
        if job.recipe != "base":
            adapter, told = trained(job, tables, chosen)
            row |= told
        strengths = STRENGTHS if job.strength is None else (job.strength,)
        rows = []
        for strength in strengths:
            found = ranks(tables, chosen, adapter, strength, job.splits, job.torch)
            rows.append(row | {"strength": strength} | found | {"seconds": round(time.time() - began, 1)})
    return rows


def trained(job: Job, tables: MemoryTables, project: Project) -> tuple[Path, Row]:
    """Train with the settings of `job` and `project`. Return the adapter file and a row with facts about the training: the
    number of samples, the mean loss of the last tenth of them, and the seconds. If the adapter of the job was kept before,
    both are read instead.
    """
    kept, began = job.adapter, time.time()
    if kept and kept.exists():
        return kept, json.loads(kept.with_suffix(".json").read_text())
    adapter, steps = train(tables, project)
    losses = steps["loss"].to_numpy()
    told = {"samples": len(losses), "loss": round(float(losses[-len(losses) // 10 :].mean()), 4)}
    told["train_seconds"] = round(time.time() - began, 1)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.with_suffix(".json").write_text(json.dumps(told))
        shutil.copyfile(adapter, kept.with_suffix(".part"))
        kept.with_suffix(".part").replace(kept)
    return adapter, told


def at_length(project: Path, settings: Row) -> Row:
    """Return `settings` with a cosine schedule over all steps of the run, and one checkpoint at its end."""
    steps = settings.get("train.steps", Project(project).config.sections["train"].steps)
    warm = max(1, steps // 20)
    schedule = {"shape": "cosine", "warmup_steps": warm, "decay_steps": steps - warm, "floor": 0.1}
    return settings | {"train.schedule": schedule, "train.checkpoint_every": steps}


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run", "report"))
    parser.add_argument("paths", type=Path, nargs="+", help="TABLES, or TABLES OUT, or OUT")
    parser.add_argument("--project", type=Path, default=PROJECTS / "library")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--root", default="", help="prepare: another library, package:NAME or a folder")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time; several share one GPU")
    parser.add_argument("--minutes", type=float, default=600.0, help="no recipe begins after this time")
    parser.add_argument("--strength", type=float, help="the strength of the only recipe of --more, so that nothing is chosen")
    parser.add_argument("--torch", action="store_true", help="PyTorch computes vectors and scores: faster on a CPU")
    parser.add_argument("--keep", type=Path, help="folder that adapters are kept in; none of them is trained twice")
    parser.add_argument("--more", type=Path, help="JSON file of other recipes: name -> settings")
    asked = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if asked.what == "prepare":
        prepare(asked.project, asked.paths[0], asked.root)
    elif asked.what == "run":
        more = json.loads(asked.more.read_text()) if asked.more else {}
        how = {"kept": asked.keep, "strength": asked.strength, "torch": asked.torch}
        folder, out = asked.paths
        run(folder, asked.project, out, asked.seeds, asked.minutes, more, asked.workers, **how)
    else:
        LOG.info("%s", report(asked.paths[0]))


if __name__ == "__main__":
    main()
