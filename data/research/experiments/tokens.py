"""What fewer tokens a step do to `micro`: sizes one after the other, and token routing, at equal steps and at equal work.

    python -m data.research.experiments.tokens OUT [--seeds 3] [--steps 300] [--only PATTERN] [--workers N] [--before FILE]

adds one JSON line per run to the file OUT, and prints the table of all runs. Runs that OUT already has are left out. If OUT is
data/measurements/tokens.jsonl, the tables in data/docs/experiments/tokens.md are replaced; the rows of the second table were
added by `git show bac2451a:tests/bench/tokens.py`.

Every run trains on 18 of the 24 pictures of data/projects/example, ends at 192 px, and is measured there: by the loss of the
other six, and by style and agreement of pictures of 40 subjects that it has not seen. The *work* of a run is the number of
tokens, of text and image, that its blocks compute, relative to the plain run; at equal work a run has as many steps as that
allows.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import pickle
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa

from data import DOCS, EXAMPLE, MEASUREMENTS
from data.research.experiments.in_memory import MemoryTables
from data.research.experiments.processes import run_all
from data.research.experiments.report import with_table
from data.research.experiments.routing import Route, RoutedTask
from data.research.experiments.scoring import Scorer
from data.research.experiments.tables import markdown
from pipeline.project.project import Project
from schemas.text_to_image import TRAIN
from stages.intervals import PERCENTILES, RESAMPLES
from stages.run import Run
from stages.text_to_image.train.batches import Sample, build_sampler
from stages.text_to_image.train.task import ImageTask
from stages.tuner import loop
from stages.tuner.control import Control
from stages.tuner.validation import VALIDATION

LOG = logging.getLogger("tokens")
PAGE, FILE = DOCS / "experiments" / "tokens.md", MEASUREMENTS / "tokens.jsonl"
BEFORE = ("images", "captions", "buckets", "latents", "embeddings")
HELD_OUT = ("avocado", "fire-truck", "guitar", "mushroom", "octopus", "turtle")
FULL, BLOCKS, TEXT = 192, 7, 48  # px; of micro
SIDES = (96, 128, FULL)
WARMUP = 20
SCORES = ("held", "style", "agreement")  # lists of numbers in a row

Row = dict[str, Any]
Settings = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    parts: Mapping[int, float]  # px -> share of the steps
    mixed: bool = False  # the sizes are drawn together instead of one after the other
    route: Route | None = None

    @property
    def work(self) -> float:
        """Of a step, on average, relative to one at full size."""
        tokens = sum(share * (image_tokens(px) + TEXT) for px, share in self.parts.items())
        routed = self.route.work(image_tokens(FULL), TEXT, BLOCKS) if self.route else 1.0
        return routed * tokens / (image_tokens(FULL) + TEXT)

    def shares(self, steps: int) -> Mapping[int, float]:
        # A run at a small size alone ends with one step at full size, so that held-out pictures are measured there.
        one = 1 / steps
        return self.parts if FULL in self.parts else {px: min(share, 1 - one) for px, share in self.parts.items()} | {FULL: one}

    def turns(self, steps: int) -> dict[int, int]:
        """The first step of each size -> px."""
        shares = sorted(self.shares(steps).items())
        return {round(sum(share for _, share in shares[:n]) * steps) + 1: px for n, (px, _) in enumerate(shares)}

    def task(self, run: Run[Any], steps: int) -> ImageTask:
        if self.route:
            return RoutedTask(run, self.route)
        return ImageTask(run) if self.mixed else SizesInTurn(run, self.turns(steps))

    def settings(self, steps: int) -> Settings:
        shares = self.shares(steps)
        return {
            "train.data.resolutions": {str(px): shares.get(px, 0.0) for px in SIDES},
            "train.steps": steps,
            "train.checkpoint_every": steps,
            "train.validation.every": steps,
            "train.schedule.decay_steps": steps - WARMUP,
        }


class SizesInTurn(ImageTask):
    """Draws one size after the other. A step draws what it would draw if all steps before had had its size."""

    def __init__(self, run: Run[Any], turns: Mapping[int, int]) -> None:
        super().__init__(run)
        self.samplers = {}
        for first, px in turns.items():
            crops = tuple(replace(crop, rate=float(crop.resolution == px)) for crop in self.data.crops)
            self.samplers[first] = build_sampler(self.config, replace(self.data, crops=crops), self.sampler.text_rows)

    def draw(self, step: int) -> list[list[Sample]]:
        return self.samplers[max(first for first in self.samplers if first <= step)].step(step)


def image_tokens(px: int) -> int:
    return (px // 16) ** 2


PLAIN = Plan({FULL: 1.0})
SMALL_FIRST = Plan({96: 0.75, FULL: 0.25})
ROUTED = {share: Plan({FULL: 1.0}, route=Route(share, 1, -2)) for share in (0.4, 0.5)}
# Name -> (plan, whether at equal work instead of equal steps)
RUNS: dict[str, tuple[Plan, bool]] = {
    "192 px": (PLAIN, False),
    "96, then 192": (SMALL_FIRST, False),
    "routing 0.4": (ROUTED[0.4], False),
    "routing 0.5": (ROUTED[0.5], False),
    "96, then 192, equal work": (SMALL_FIRST, True),
    "128, then 192, equal work": (Plan({128: 0.75, FULL: 0.25}), True),
    "96 and 192 mixed, equal work": (Plan({96: 0.75, FULL: 0.25}, mixed=True), True),
    "96 px alone, equal work": (Plan({96: 1.0}), True),
    "routing 0.4, equal work": (ROUTED[0.4], True),
    "routing 0.5, equal work": (ROUTED[0.5], True),
}
FIRST = next(iter(RUNS))


def steps_of(name: str, steps: int) -> int:
    plan, equal_work = RUNS[name]
    return round(steps / plan.work) if equal_work else steps


class Bench:
    """The tables before `train`, from the file `before` if given, and the base's pictures at full size."""

    def __init__(self, folder: Path, before: Path | None = None) -> None:
        self.folder = folder
        self.tables = MemoryTables(folder / "before")
        self.tables.rows = pickle.loads(before.read_bytes()) if before else prepared(folder)
        self.tables.files = {name: folder / "before" / name / "artifacts" for name in self.tables.rows}
        base = self.tables.branch(folder / "base")
        base.rows["train"], base.files["train"] = TRAIN.batch.empty_table(), folder / "train" / "artifacts"
        self.scorer = Scorer(list(self.pictures(base, {})))

    def pictures(self, tables: MemoryTables, more: Settings) -> Iterator[tuple[str, Path]]:
        """(subject, file) of each prompt, in their order."""
        drawn = tables.run(project(more | {"samples.base": not more}), "samples").to_pylist()
        found = {row["prompt"].partition(", ")[2]: tables.files["samples"] / row["path"] for row in drawn}
        yield from sorted(found.items())

    def run(self, name: str, steps: int, seed: int) -> Row:
        plan = RUNS[name][0]
        more = plan.settings(steps) | {"train.seed": seed}
        tables = self.tables.branch(Path(tempfile.mkdtemp(dir=self.folder)))

        def train(run: Run[Any]) -> Iterator[pa.RecordBatch]:
            return loop.train(run, plan.task(run, steps), Control(run, run.config))

        rows = tables.run(project(more), "train", compute=train).to_pylist()
        held = [row for row in rows if row["split"] == VALIDATION and row["width"] * row["height"] > SIDES[-2] ** 2]
        found: Row = {"kind": "run", "run": name, "seed": seed, "steps": steps, "work": round(plan.work * steps, 1)}
        found["held"] = [round(row["loss"], 5) for row in held if row["step"] == steps]
        found["held_before"] = round(float(np.mean([row["loss"] for row in held if not row["step"]])), 5)
        scores = [self.scorer.score(picture, subject, None) for subject, picture in self.pictures(tables, more)]
        found |= {column: [round(float(each[column]), 4) for each in scores] for column in ("style", "agreement")}
        return found | {"chip": str(mx.device_info().get("device_name") or "CPU")}


def prepared(folder: Path) -> dict[str, pa.Table]:
    tables = MemoryTables(folder / "before")
    for name in BEFORE:
        tables.run(project(), name)
    return tables.rows


def project(more: Settings | None = None) -> Project:
    return Project(
        EXAMPLE,
        {
            "buckets.resolutions": SIDES,
            "train.validation.paths": tuple(f"{name}.webp" for name in HELD_OUT),
            "train.validation.sigmas": tuple(round(0.1 * n, 1) for n in range(1, 10)),
            "samples.first_prompts": 0,
            "samples.guidance": 1.0,
            "samples.steps": 12,
            "samples.width": FULL,
            "samples.height": FULL,
        }
        | (more or {}),
    )


def read_rows(file: Path, kind: str = "run") -> list[Row]:
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in rows if row["kind"] == kind]


def table(rows: Sequence[Row]) -> str:
    """By run: work, steps, and means with their differences from the plain run, paired by seed and picture."""
    by_run = {name: {row["seed"]: row for row in rows if row["run"] == name} for name in RUNS}
    work = np.mean([row["work"] for row in by_run[FIRST].values()] or [1.0])
    lines = []
    for name, own in by_run.items():
        seeds = sorted(set(own) & set(by_run[FIRST]))
        if not seeds:
            continue
        line = [name, str(own[seeds[0]]["steps"]), f"{own[seeds[0]]['work'] / work:.2f}"]
        for column, digits in zip(SCORES, (4, 3, 3), strict=True):
            values_RN, plain_RN = (np.array([found[seed][column] for seed in seeds]) for found in (own, by_run[FIRST]))
            line.append(f"{values_RN.mean():.{digits}f}")
            line.append("-" if name == FIRST else interval(values_RN - plain_RN, digits))
        lines.append(line)
    head = ["run", "steps", "work"]
    for column in ("held-out loss", "style", "agreement"):
        head += [column, f"less {FIRST}"]
    return markdown(head, lines)


def interval(differences_RN: np.ndarray, digits: int) -> str:
    """Mean and 95 % bootstrap interval; seeds R and pictures N are both resampled."""
    draw = np.random.default_rng(0)
    runs, places = (draw.integers(0, count, (RESAMPLES, count)) for count in differences_RN.shape)
    means = [differences_RN[np.ix_(r, n)].mean() for r, n in zip(runs, places, strict=True)]
    low, high = np.percentile(means, PERCENTILES)
    return f"{differences_RN.mean():+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def steps_table(rows: Sequence[Row]) -> str:
    head = ("step", "seconds", "of the plain step", "tokens that blocks compute", "GB")
    plain = next((row["tokens"] for row in rows), 0)
    lines = []
    for row in rows:
        work = row["work"] * row["tokens"] / plain
        name = f"{row['px']} px" + (f", routing {row['routing']}" if row["routing"] != "plain" else "")
        lines.append((name, f"{row['s']:.3f}", f"{row['of_plain']:.2f}", f"{work:.2f}", f"{row['peak_gb']:.1f}"))
    return markdown(head, lines)


_BENCH: list[Bench] = []  # of this worker process


def _work(row: Row, folder: str) -> Row:
    if not _BENCH:
        _BENCH.append(Bench(Path(tempfile.mkdtemp(dir=folder)), row["before"]))
    return _BENCH[0].run(row["run"], row["steps"], row["seed"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="of the plain run")
    parser.add_argument("--only", default="*", help="names of runs, with wildcards")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--before", type=Path, help="tables before training, for a machine without transformers; made if absent")
    asked = parser.parse_args()
    if asked.before and not asked.before.exists():
        with tempfile.TemporaryDirectory() as folder:
            asked.before.write_bytes(pickle.dumps(prepared(Path(folder))))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    done = {(row["run"], row["seed"]) for row in read_rows(asked.out)}
    todo: list[Row] = [
        {"run": name, "seed": seed, "steps": steps_of(name, asked.steps), "before": asked.before}
        for seed in range(asked.seeds)
        for name in RUNS
        if fnmatch.fnmatch(name, asked.only) and (name, seed) not in done
    ]
    todo.sort(key=lambda row: -row["steps"])  # processes end together
    for row in run_all(_work, todo, asked.out, asked.workers):
        means = ", ".join(f"{column} {np.mean(row[column]):.4f}" for column in SCORES)
        LOG.info("%s, seed %d: %s", row["run"], row["seed"], means)
    tables = {"tokens": table(read_rows(asked.out)), "steps": steps_table(read_rows(asked.out, "step"))}
    LOG.info("\n\n".join(tables.values()))
    if asked.out.resolve() == FILE.resolve():
        for name, found in tables.items():
            PAGE.write_text(with_table(PAGE.read_text(), name, found))


if __name__ == "__main__":
    main()
