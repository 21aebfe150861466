"""What a slider does to `micro`: yellow against blue backgrounds, at five strengths, and whether the subject stays.

    python -m data.research.experiments.slider OUT [--seeds 5]

adds one JSON line per seed to the file OUT, and prints the table of all rows. Seeds that OUT already has are left out. If OUT is
data/measurements/slider.jsonl, the table in data/docs/experiments/slider.md is replaced.

The slider is trained on eight subjects and drawn on eight others. *Colour* is the place of a picture's border between the base's
pictures of the same subject for the negative prompt (0) and the positive one (1), by mean RGB. *Agreement* is the cosine of
agreement.py with a sentence that names the subject and a background of a third colour, or none. *Subject* is that less the mean
cosine with the sentences of the other seven subjects, on which the background has the same effect.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data import DOCS, MEASUREMENTS
from data.research.experiments.agreement import Agreement
from data.research.experiments.in_memory import MemoryTables
from data.research.experiments.processes import append
from data.research.experiments.report import with_table
from data.research.experiments.tables import markdown
from pipeline.project.project import Project
from stages.intervals import PERCENTILES, RESAMPLES

LOG = logging.getLogger("slider")
PAGE, FILE = DOCS / "experiments" / "slider.md", MEASUREMENTS / "slider.jsonl"
STAGES = ("captions", "embeddings", "drawings")
STRENGTHS = (-2.0, -1.0, 0.0, 1.0, 2.0)
NEGATIVE_POLE, POSITIVE_POLE = "the base, negative prompt", "the base, positive prompt"
NAMES = [*(f"{strength:g}" for strength in STRENGTHS), NEGATIVE_POLE, POSITIVE_POLE]
POSITIVE, NEGATIVE = "{caption} on a yellow background", "{caption} on a blue background"
# Subject -> the sentence that its pictures are compared with
SUBJECTS = {
    "a backpack": "a backpack on a pink background",
    "a bicycle": "a bicycle on a black background",
    "a birthday cake": "a birthday cake on an orange background",
    "a car": "a car on a grey background",
    "a carrot": "a carrot on a black background",
    "a snail": "a snail",
    "a trophy": "a trophy",
    "an ice cream": "an ice cream",
}
NEUTRAL = ("a dog", "a fox", "a guitar", "a house", "a tree", "a castle", "a rocket", "a pear")
POLES = [pole.replace("{caption}", each) for pole in (NEGATIVE, POSITIVE) for each in SUBJECTS]
EDGE = 4  # pixels of a picture's border
PROJECT = f"""
[project]
family = "micro"

[images]
folder = []

[captions]
preview_prompts = {json.dumps([*SUBJECTS, *POLES])}

[embeddings]
precision = "float32"

[drawings]
precision = "float32"
width = 128
height = 128
steps = 8
seeds = [0]

[train]
precision = "float32"
steps = 40
batch_size = 4
rank = 8
lr = 3e-3
checkpoint_every = 40

[train.schedule]
shape = "cosine"
warmup_steps = 5
decay_steps = 35

[train.noise]
base = "uniform"
shift = "none"

[train.slider]
positive = "{POSITIVE}"
negative = "{NEGATIVE}"
neutral = {json.dumps(NEUTRAL)}
guidance = 1.0

[samples]
precision = "float32"
width = 128
height = 128
steps = 8
guidance = 1.0
strengths = [-2, -1, 1, 2]
"""

Row = dict[str, Any]


class Bench:
    """The drawings that all seeds train on, and the base's pictures: of the subjects, and of both poles of each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.agreement = folder, Agreement(list(SUBJECTS.values()))
        (folder / "project.toml").write_text(PROJECT)
        self.tables, project = MemoryTables(folder / "before"), Project(folder)
        for name in ("images", "buckets", "latents", "train"):
            self.tables.rows[name] = project.stage(name).writes.batch.empty_table()
            self.tables.files[name] = folder / name / "artifacts"
        for name in STAGES:
            self.tables.run(project, name)
        base = self.tables.branch(folder / "base")
        found = self._pictures(base, {"samples.strengths": [1.0]})
        self.base = {prompt: picture for (_, prompt), picture in found.items()}

    def _pictures(self, tables: MemoryTables, more: dict[str, Any]) -> dict[tuple[float, str], Image.Image]:
        found = {}
        for row in tables.run(Project(self.folder, more), "samples").to_pylist():
            strength, times, _ = row["adapter_id"].partition("*")
            picture = Image.open(tables.files["samples"] / row["path"]).convert("RGB")
            found[float(strength) if times else float(bool(strength)), row["prompt"]] = picture
        return found

    def run(self, seed: int) -> Row:
        tables = self.tables.branch(Path(tempfile.mkdtemp(dir=self.folder)))
        seeded, began = {"train.seed": seed}, time.monotonic()
        losses = tables.run(Project(self.folder, seeded), "train")["loss"].to_numpy()
        seconds = time.monotonic() - began
        drawing = {"samples.base": False, "samples.first_prompts": len(SUBJECTS), "samples.seeds": [0]}
        drawn = self._pictures(tables, seeded | drawing)
        drawn |= {(0.0, subject): self.base[subject] for subject in SUBJECTS}
        found: Row = {"seed": seed, "loss": [float(losses[:20].mean()), float(losses[-20:].mean())], "train_seconds": seconds}
        measures: dict[str, Callable[[Image.Image, str], float]]
        measures = {"colour": self.colour, "agreement": self.agrees, "subject": self.shows}
        for name, measure in measures.items():
            found[name] = {f"{each:g}": [round(measure(drawn[each, s], s), 4) for s in SUBJECTS] for each in STRENGTHS}
            # The base's own pictures for both prompts, without any adapter.
            for pole, prompt in ((NEGATIVE_POLE, NEGATIVE), (POSITIVE_POLE, POSITIVE)):
                pictures = ((s, self.base[prompt.replace("{caption}", s)]) for s in SUBJECTS)
                found[name][pole] = [round(measure(picture, s), 4) for s, picture in pictures]
        return found

    def colour(self, picture: Image.Image, subject: str) -> float:
        low_3, high_3 = (border(self.base[pole.replace("{caption}", subject)]) for pole in (NEGATIVE, POSITIVE))
        return float((border(picture) - low_3) @ (high_3 - low_3) / np.square(high_3 - low_3).sum())

    def agrees(self, picture: Image.Image, subject: str) -> float:
        return self._cosines(picture)[subject]

    def shows(self, picture: Image.Image, subject: str) -> float:
        cosines = self._cosines(picture)
        return cosines.pop(subject) - float(np.mean(list(cosines.values())))

    def _cosines(self, picture: Image.Image) -> dict[str, float]:
        features = self.agreement.encoder.encode(picture)
        return {each: float(self.agreement.score(features, text)["agreement"]) for each, text in SUBJECTS.items()}


def border(picture: Image.Image) -> np.ndarray:
    """Mean RGB of a picture's border, (3,)."""
    pixels_HW3 = np.asarray(picture, np.float64)
    inside = np.zeros(pixels_HW3.shape[:2], bool)
    inside[EDGE:-EDGE, EDGE:-EDGE] = True
    found: np.ndarray = pixels_HW3[~inside].mean(0)
    return found


def read_rows(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(rows: list[Row]) -> str:
    """By strength, and of the base with either prompt: means over seeds and subjects, and differences paired by both."""
    values_RNS = {
        name: np.array([[row[name][each] for each in NAMES] for row in rows]) for name in ("colour", "agreement", "subject")
    }
    lines, base = [], NAMES.index("0")
    for place, name in enumerate(NAMES):
        colour_RNS = values_RNS["colour"]
        further = 0 < place < len(STRENGTHS)
        cells = [name, f"{colour_RNS[:, place].mean():.2f}"]
        cells += [interval(colour_RNS[:, place] - colour_RNS[:, place - 1]) if further else "-"]
        for measure in ("subject", "agreement"):
            found_RNS = values_RNS[measure]
            change = interval(found_RNS[:, place] - found_RNS[:, base]) if place != base else "-"
            cells += [f"{found_RNS[:, place].mean():.3f}", change]
        lines.append(tuple(cells))
    head = ("strength", "colour", "more than one strength lower", "subject", "change from the base")
    return markdown((*head, "agreement", "change from the base"), lines)


def interval(differences_RS: np.ndarray) -> str:
    """Mean and 95 % bootstrap interval; seeds R and subjects S are both resampled."""
    draw = np.random.default_rng(0)
    runs, subjects = (draw.integers(0, count, (RESAMPLES, count)) for count in differences_RS.shape)
    means = [differences_RS[np.ix_(r, s)].mean() for r, s in zip(runs, subjects, strict=True)]
    low, high = np.percentile(means, PERCENTILES)
    return f"{differences_RS.mean():+.3f} ({low:+.3f} to {high:+.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    todo = sorted(set(range(asked.seeds)) - {row["seed"] for row in read_rows(asked.out)})
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder)) if todo else None
        for seed in todo:
            assert bench is not None
            append(asked.out, row := bench.run(seed))
            LOG.info("seed %d: %s", seed, {name: float(np.mean(values)) for name, values in row["colour"].items()})
    found = table(read_rows(asked.out))
    LOG.info(found)
    if asked.out.resolve() == FILE.resolve():
        PAGE.write_text(with_table(PAGE.read_text(), "slider", found))


if __name__ == "__main__":
    main()
