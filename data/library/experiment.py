"""Tune retriever-micro to a library, and compare it with the base on functions that the tuning has not seen.

    python -m data.library.experiment prepare TABLES                  # read the library; needs the whole program
    python -m data.library.experiment run TABLES OUT [--seeds 3]      # train and rank; needs MLX and pyarrow

`prepare` writes the tables of a project into the folder TABLES. `run` adds one JSON line per run to the file OUT, and leaves out
runs that OUT has already. `report` prints what OUT says. No table of the project is written, so a GPU machine needs no Lance.

The recipe is chosen by MRR@10 on the validation queries. The test queries are read once, for that recipe.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
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
RECIPES: dict[str, Row] = {
    "as in project.toml": {},
    "2 hard negatives": {"train.hard_negatives": 2},
    "batch 128": {"train.batch_size": 128},
    "lr 3e-4": {"train.lr": 3e-4},
    "lr 3e-3": {"train.lr": 3e-3},
    "temperature 0.02": {"train.loss": {"temperature": 0.02}},
    "symmetric": {"train.loss": {"symmetric": True}},
    "rank 64": {"train.rank": 64, "train.alpha": 128.0},
    "attention only": {"train.targets": ["q", "k", "v", "o"]},
    "200 steps": {"train.steps": 200},
    "1200 steps": {"train.steps": 1200},
}


def prepare(project: Path, folder: Path) -> None:
    """Run the stages before `train` in memory, and write the tables that training reads into `folder`. `project` is the folder
    of the project.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        tables = MemoryTables(Path(work))
        for name in BEFORE:
            LOG.info("%s: %d rows", name, len(tables.run(Project(project, {"negatives.count": MOST}), name)))
    for name in CARRIED:
        parquet.write_table(tables.rows[name], folder / f"{name}.parquet", compression="zstd")


def load(folder: Path, work: Path) -> MemoryTables:
    """Return the tables that `prepare` has written into `folder`. Artifacts of later runs are written below `work`."""
    tables = MemoryTables(work)
    tables.rows = {name: parquet.read_table(folder / f"{name}.parquet") for name in CARRIED}
    return tables


def train(tables: MemoryTables, project: Project) -> tuple[Path, pa.Table]:
    """Train with the settings of `project`, and return the file of the adapter and the rows of the table `train`."""
    from stages.tuner.checkpoint import ADAPTER

    rows = tables.run(project, "train")
    return tables.files["train"] / ADAPTER, rows


def ranks(tables: MemoryTables, project: Project, adapter: Path | None) -> dict[str, list[int]]:
    """Return the rank of the right function for every query, as a dict from split ("valid", "test") to ranks in the order of
    `pair_id`. Every function of the library with a docstring is ranked. `adapter` is an adapter file, or None for the base.
    """
    from stages.retrieval.encoder import load_encoder

    pairs = sorted(tables.rows["pairs"].to_pylist(), key=lambda row: str(row["pair_id"]))
    asked = [row for row in pairs if row["rejected"] is None and row["split"] != "train"]
    encoder = load_encoder(project.component("encoder"), None, project.family, adapter)  # type: ignore[arg-type]
    tokens = ArrayReader(tables.rows["tokens"], TOKENS)
    documents = encode(encoder, [tokens.read(row["text_id"]) for row in pairs])
    scores = maxsim(encode(encoder, [tokens.read(row["query_id"]) for row in asked]), documents)
    found: dict[str, list[int]] = {"valid": [], "test": []}
    for pair, row in zip(asked, scores, strict=True):
        same = [n for n, other in enumerate(pairs) if other["duplicate_group"] == pair["duplicate_group"]]
        own = next(n for n in same if pairs[n]["pair_id"] == pair["pair_id"])
        found[pair["split"]].append(measures.rank_of(row, own, np.array([n for n in same if n != own], np.int64)))
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


def run(folder: Path, project: Path, out: Path, seeds: int, minutes: float, more: dict[str, Row]) -> None:
    """Measure the base, train every recipe with seed 0, then the best recipe with the other seeds. Add one line per run to `out`.
    `minutes` after the start, no run begins any more. `more` replaces `RECIPES`.
    """
    recipes = more or RECIPES
    ends = time.monotonic() + 60 * minutes
    rows = read(out)

    def add(name: str, seed: int) -> None:
        if time.monotonic() > ends or any((row["recipe"], row["seed"]) == (name, seed) for row in rows):
            return
        row = measure(folder, project, name, seed, recipes.get(name, {}))
        rows.append(row)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = ", ".join(f"{split} {reciprocal(row, split).mean():.4f}" for split in ("valid", "test"))
        LOG.info("%-20s seed %d: MRR@10 %s, loss %s, %.0f s", name, seed, shown, row.get("loss"), row["seconds"])

    for name in ("base", *recipes):
        add(name, 0)
    for seed in range(1, seeds):
        add(best_recipe(rows), seed)


def read(out: Path) -> list[Row]:
    """Return the rows of the file `out`, or none if there is no such file."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def best_recipe(rows: list[Row]) -> str:
    """Return the name of the recipe whose run with seed 0 has the best MRR@10 on the validation queries."""
    first = [row for row in rows if row["recipe"] != "base" and row["seed"] == 0]
    return str(max(first, key=lambda row: reciprocal(row, "valid").mean())["recipe"])


def measure(folder: Path, project: Path, name: str, seed: int, settings: Row) -> Row:
    """Return the row of one run: its recipe, the ranks of the valid and test queries, the training loss, and seconds."""
    began = time.monotonic()
    row: Row = {"recipe": name, "seed": seed, "set": settings}
    with tempfile.TemporaryDirectory() as work:
        tables = load(folder, Path(work))
        chosen = Project(project, at_length(project, settings | {"train.seed": seed}))
        if name == "base":
            return row | ranks(tables, chosen, None) | {"seconds": round(time.monotonic() - began, 1)}
        adapter, rows = train(tables, chosen)
        losses = rows["loss"].to_numpy()
        ended = time.monotonic()
        row |= ranks(tables, chosen, adapter) | {"loss": round(float(losses[-len(losses) // 10 :].mean()), 4)}
    return row | {"samples": len(losses), "train_seconds": round(ended - began, 1), "seconds": round(time.monotonic() - began, 1)}


def at_length(project: Path, settings: Row) -> Row:
    """Return `settings` with a cosine schedule over all steps of the run, and one checkpoint at its end."""
    steps = settings.get("train.steps", Project(project).config.sections["train"].steps)
    warm = max(1, steps // 20)
    schedule = {"shape": "cosine", "warmup_steps": warm, "decay_steps": steps - warm, "floor": 0.1}
    return settings | {"train.schedule": schedule, "train.checkpoint_every": steps}


def report(out: Path) -> str:
    """Return what the file `out` says, as Markdown. One row per recipe has the MRR@10 of the validation queries, the
    mean over the seeds. The recipe that is best there with seed 0 is compared with the base on the test queries, with 95 %
    intervals.
    """
    rows = read(out)
    base = next(row for row in rows if row["recipe"] == "base")
    tuned: dict[str, list[Row]] = {}
    for row in rows:
        if row is not base:
            tuned.setdefault(row["recipe"], []).append(row)
    valid = {name: float(np.mean([reciprocal(row, "valid").mean() for row in some])) for name, some in tuned.items()}
    lines = ["| recipe | seeds | MRR@10, valid |", "|---|---:|---:|", f"| base | | {reciprocal(base, 'valid').mean():.3f} |"]
    lines += [f"| {name} | {len(tuned[name])} | {value:.3f} |" for name, value in sorted(valid.items(), key=lambda x: x[1])]
    best = best_recipe(rows)
    before = reciprocal(base, "test")
    lines += ["", f"Test, {len(before)} queries, recipe: {best}", "", "| encoder | P@1 | MRR@10 | R@10 |", "|---|---|---|---|"]
    for name, row in [("base", base), *((f"tuned, seed {row['seed']}", row) for row in tuned[best])]:
        shown = []
        for label in ("P@1", "MRR@10", "R@10"):
            each = measures.MEASURES[label](np.array(row["test"]))
            low, high = measures.bootstrap(each)
            shown.append(f"{each.mean():.3f} [{low:.3f}, {high:.3f}]")
        lines.append(f"| {name} | {' | '.join(shown)} |")
    for row in tuned[best]:
        gain = reciprocal(row, "test") - before
        low, high = measures.bootstrap(gain)
        lines.append(f"\nSeed {row['seed']} less base, MRR@10: {gain.mean():+.3f} [{low:+.3f}, {high:+.3f}], paired bootstrap.")
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
    parser.add_argument("--minutes", type=float, default=600.0, help="no run begins after this time")
    parser.add_argument("--more", type=Path, help="JSON file of other recipes: name -> settings")
    asked = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if asked.what == "prepare":
        prepare(asked.project, asked.paths[0])
    elif asked.what == "run":
        more = json.loads(asked.more.read_text()) if asked.more else {}
        run(asked.paths[0], asked.project, asked.paths[1], asked.seeds, asked.minutes, more)
    else:
        LOG.info("%s", report(asked.paths[0]))


if __name__ == "__main__":
    main()
