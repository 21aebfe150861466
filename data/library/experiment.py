"""Tune retriever-micro to a library, and compare it with the base on functions that the tuning has not seen.

    python -m data.library.experiment prepare TABLES [--root package:NAME]      # read the library; needs the whole program
    python -m data.library.experiment run TABLES OUT [--seeds 3] [--workers 4]  # train and rank; needs MLX and pyarrow
    python -m data.library.experiment report OUT

`prepare` writes the tables of a project into the folder TABLES. `run` adds one JSON line per recipe and strength to the file OUT
as soon as it is measured, and leaves out runs that OUT has already. `report` prints what OUT says. No table of the project is
written, so a GPU machine needs no Lance.

Recipe and strength are chosen by MRR@10 on the validation queries. A strength below 1 uses only that share of the adapter's
change of the weights. Then the chosen recipe is trained once per seed. The test queries are read for these runs and the base.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
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

from data.experiments.in_memory import ArrayReader, MemoryTables
from pipeline.project.project import Project
from schemas.retrieval.tokens import TOKENS
from stages.retrieval.search import measures

LOG = logging.getLogger("library")
HERE = Path(__file__).parent
BEFORE = ("sources", "units", "pairs", "tokens", "negatives")
CARRIED = ("pairs", "tokens", "negatives")  # what training and evaluation read
MOST = 4  # hard negatives of a pair in the tables, for the recipes that use them
BATCH = 64  # texts that are encoded together

Row = dict[str, Any]
NEAR: Row = {"train.batch_size": 256, "train.loss": {"temperature": 0.04, "symmetric": True}}  # as the base was trained
STRENGTHS = (0.25, 0.5, 0.75, 1.0)
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
    """Return the tables that `prepare` has written into `folder`. Artifacts of later runs are written below `work`."""
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


def ranks(tables: MemoryTables, project: Project, adapter: Path | None, strength: float, splits: Sequence[str]) -> Row:
    """Rank all functions of the library for each query, and return the rank of the right function: split -> list of ranks.
    `splits` names the splits to use, "valid" or "test". The ranks are in the order of `pair_id`, and rank 1 is the best.
    `adapter` is an adapter file, or None for the base. `strength` is the factor of the adapter's change, 0 to 1.
    """
    import mlx.core as mx

    from stages.retrieval.adapter import read_adapter
    from stages.retrieval.encoder import Encoder

    pairs = sorted(tables.rows["pairs"].to_pylist(), key=lambda row: str(row["pair_id"]))
    asked = [(n, row) for n, row in enumerate(pairs) if row["rejected"] is None and row["split"] in splits]
    mx.clear_cache()  # the memory of training, which other runs on the GPU may want
    family: Any = project.family
    model = family.architecture.load_encoder(project.component("encoder"), mx.float32, family.head_seed)
    arrays, scales = read_adapter(adapter, model.linears(), strength) if adapter else ({}, {})
    encoder = Encoder(model, arrays, scales, None, 0)
    tokens = ArrayReader(tables.rows["tokens"], TOKENS)
    documents = encode(encoder, [tokens.read(row["text_id"]) for row in pairs])
    scores = maxsim(encode(encoder, [tokens.read(row["query_id"]) for _, row in asked]), documents)
    groups: dict[str, list[int]] = {}
    for n, row in enumerate(pairs):
        groups.setdefault(row["duplicate_group"], []).append(n)
    found: Row = {split: [] for split in splits}
    for (own, pair), row in zip(asked, scores, strict=True):
        others = np.array([n for n in groups[pair["duplicate_group"]] if n != own], np.int64)
        found[pair["split"]].append(measures.rank_of(row, own, others))
    return found


def encode(encoder: Any, texts: list[np.ndarray]) -> list[np.ndarray]:
    """Return the token vectors of each text, float32 of shape (tokens, width). Texts of similar length are encoded together."""
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    found: list[np.ndarray] = [np.zeros(0)] * len(texts)
    for start in range(0, len(order), BATCH):
        some = order[start : start + BATCH]
        for n, vectors in zip(some, encoder.encode_ids([texts[n] for n in some]), strict=True):
            found[n] = vectors
    return found


def maxsim(queries: list[np.ndarray], documents: list[np.ndarray]) -> np.ndarray:
    """Return the MaxSim score of every document for every query, float32 of shape (queries, documents)."""
    import mlx.core as mx

    together_QE = mx.array(np.concatenate(queries))
    lengths = np.array([len(query) for query in queries])
    mean_BQ = np.repeat(np.eye(len(queries), dtype=np.float32) / lengths, lengths, axis=1)
    found = np.empty((len(queries), len(documents)), np.float32)
    order = sorted(range(len(documents)), key=lambda n: len(documents[n]))
    for start in range(0, len(order), BATCH):
        some = order[start : start + BATCH]
        longest = len(documents[some[-1]])
        padded = np.stack([np.resize(documents[n], (longest, documents[n].shape[1])) for n in some])  # repeats change no maximum
        products_QNK = (together_QE @ mx.array(padded).reshape(-1, padded.shape[-1]).T).reshape(-1, len(some), longest)
        found[:, some] = np.array(mx.array(mean_BQ) @ products_QNK.max(axis=-1))
    return found


def run(folder: Path, project: Path, out: Path, seeds: int, minutes: float, more: dict[str, Row], workers: int = 1) -> None:
    """Run the whole experiment, and append one row per measurement to the file `out`. First the base and every recipe are
    measured on the validation queries, with seed 0. Then the best recipe is trained with `seeds` seeds, and measured on the
    test queries too. `folder` holds the tables that `prepare` wrote.

    No new recipe begins later than `minutes` after the start. `more` is a dict of recipes to use instead of `RECIPES`; if
    it is empty, `RECIPES` is used. `workers` is the number of runs at a time, each in its own process.
    """
    recipes = more or RECIPES
    ends = time.time() + 60 * minutes
    done = {(row["recipe"], row["seed"]) for row in read(out)}
    first = [Job(folder, project, name, 0, recipes.get(name, {}), ends=ends) for name in ("base", *recipes)]
    make([job for job in first if (job.recipe, 0) not in done], out, workers)
    best, strength = best_recipe(read(out))
    tested = {row["seed"] for row in read(out) if "test" in row and (row["recipe"], row["strength"]) == (best, strength)}
    last = [Job(folder, project, best, seed, recipes[best], strength) for seed in range(seeds) if seed not in tested]
    make(last, out, workers)


def make(jobs: list[Job], out: Path, workers: int) -> None:
    """Measure each of `jobs` and append the results to the file `out` as they end. `workers` jobs run at a time."""
    spawned = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    with ProcessPoolExecutor(workers, spawned) if workers > 1 else ThreadPoolExecutor(1) as pool:
        for done in as_completed([pool.submit(measure, job) for job in jobs]):
            for row in done.result():
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                valid = reciprocal(row, "valid").mean()
                shown = f"loss {row.get('loss')}, {row['samples']} samples, {row['seconds']:.0f} s"
                LOG.info("%-30s x %.2f seed %d: valid MRR@10 %.4f, %s", row["recipe"], row["strength"], row["seed"], valid, shown)


def read(out: Path) -> list[Row]:
    """Return the rows of the file `out`, or none if there is no such file."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def best_recipe(rows: list[Row]) -> tuple[str, float]:
    """Return the name of the recipe, and the strength, with the best MRR@10 on the validation queries. Only rows without
    ranks of test queries are compared.
    """
    first = [row for row in rows if "test" not in row]
    best = max(first, key=lambda row: reciprocal(row, "valid").mean())
    return str(best["recipe"]), float(best["strength"])


@dataclass(frozen=True)
class Job:
    """One run of the experiment. `recipe` is the name of the run's recipe, and `settings` are its project settings.
    `folder` holds the tables that `prepare` wrote, and `project` is the project's folder. With a `strength`, only that
    strength is measured, and the test queries are read too. The run does not begin after the time `ends`, in seconds of
    `time.time()`.
    """

    folder: Path
    project: Path
    recipe: str
    seed: int
    settings: Row
    strength: float | None = None
    ends: float = math.inf


def measure(job: Job) -> list[Row]:
    """Train with the settings of `job`, and return one row per strength of the adapter. A row has the ranks of the
    validation queries, the training loss, and the seconds since the start. The base and a job with a strength also have the
    ranks of the test queries. After the time `job.ends`, nothing is trained and the list is empty.
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
            adapter, steps = train(tables, chosen)
            losses = steps["loss"].to_numpy()
            row |= {"samples": len(losses), "loss": round(float(losses[-len(losses) // 10 :].mean()), 4)}
            row["train_seconds"] = round(time.time() - began, 1)
        tested = adapter is None or job.strength is not None
        strengths = (0.0,) if adapter is None else STRENGTHS if job.strength is None else (job.strength,)
        rows = []
        for strength in strengths:
            found = ranks(tables, chosen, adapter, strength, ("valid", "test") if tested else ("valid",))
            rows.append(row | {"strength": strength} | found | {"seconds": round(time.time() - began, 1)})
    return rows


def at_length(project: Path, settings: Row) -> Row:
    """Return `settings` with a cosine schedule over all steps of the run, and one checkpoint at its end."""
    steps = settings.get("train.steps", Project(project).config.sections["train"].steps)
    warm = max(1, steps // 20)
    schedule = {"shape": "cosine", "warmup_steps": warm, "decay_steps": steps - warm, "floor": 0.1}
    return settings | {"train.schedule": schedule, "train.checkpoint_every": steps}


def report(out: Path) -> str:
    """Return the results in the file `out` as Markdown. A first table has the MRR@10 of the validation queries for each
    recipe and strength. A second compares the best recipe with the base on the test queries. All intervals are 95 %.

    Intervals of differences are of a paired bootstrap over the queries, for each seed and for the mean of the seeds.
    """
    rows = read(out)
    base = next(row for row in rows if row["recipe"] == "base")
    first = [row for row in rows if "test" not in row]
    lines = ["| recipe | " + " | ".join(f"{share:g}" for share in STRENGTHS) + " |", "|---" + "|---:" * len(STRENGTHS) + "|"]
    for name in dict.fromkeys(row["recipe"] for row in first):
        values = {row["strength"]: reciprocal(row, "valid").mean() for row in first if row["recipe"] == name}
        lines.append(f"| {name} | " + " | ".join(f"{values[share]:.3f}" for share in STRENGTHS) + " |")
    best, strength = best_recipe(rows)
    before, valid = reciprocal(base, "test"), reciprocal(base, "valid")
    lines += ["", f"MRR@10 of {len(valid)} validation queries by strength; the base has {valid.mean():.3f}.", ""]
    lines += [f"Test, {len(before)} queries, recipe: {best}, strength {strength:g}", ""]
    lines += ["| encoder | P@1 | MRR@10 | R@10 |", "|---|---|---|---|"]
    tuned = [row for row in rows if "test" in row and (row["recipe"], row["strength"]) == (best, strength)]
    for name, row in [("base", base), *((f"tuned, seed {row['seed']}", row) for row in tuned)]:
        shown = []
        for label in ("P@1", "MRR@10", "R@10"):
            each = measures.MEASURES[label](np.array(row["test"]))
            low, high = measures.bootstrap(each)
            shown.append(f"{each.mean():.3f} [{low:.3f}, {high:.3f}]")
        lines.append(f"| {name} | {' | '.join(shown)} |")
    gains = {f"Seed {row['seed']}": reciprocal(row, "test") - before for row in tuned}
    if len(gains) > 1:
        gains[f"Mean of {len(gains)} seeds"] = np.mean(list(gains.values()), axis=0)
    for name, gain in gains.items():
        low, high = measures.bootstrap(gain)
        lines.append(f"\n{name} less base, MRR@10: {gain.mean():+.3f} [{low:+.3f}, {high:+.3f}], paired bootstrap.")
    return "\n".join(lines)


def reciprocal(row: Row, split: str) -> np.ndarray:
    """Return the reciprocal rank of each query of `split` in `row`, 0 beyond rank 10."""
    return measures.reciprocal(np.array(row[split]))


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run", "report"))
    parser.add_argument("paths", type=Path, nargs="+", help="TABLES, or TABLES OUT, or OUT")
    parser.add_argument("--project", type=Path, default=HERE)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--root", default="", help="prepare: another library, package:NAME or a folder")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time; several share one GPU")
    parser.add_argument("--minutes", type=float, default=600.0, help="no recipe begins after this time")
    parser.add_argument("--more", type=Path, help="JSON file of other recipes: name -> settings")
    asked = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if asked.what == "prepare":
        prepare(asked.project, asked.paths[0], asked.root)
    elif asked.what == "run":
        more = json.loads(asked.more.read_text()) if asked.more else {}
        run(asked.paths[0], asked.project, asked.paths[1], asked.seeds, asked.minutes, more, asked.workers)
    else:
        LOG.info("%s", report(asked.paths[0]))


if __name__ == "__main__":
    main()
