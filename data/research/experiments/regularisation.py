"""Compare regularisation images with preservation: what is learned with the trigger, and what stays without it.

    python -m data.research.experiments.regularisation OUT [--seeds 3] [--steps 300] [--only PATTERN] [--workers N]

adds one JSON line per run to the file OUT, and prints the table of all rows. Runs that OUT already has are left out. If a
page of the same name lies in data/docs/experiments, such as regularisation.md, the table in the page is replaced.

The base draws two regularisation images for each of the 24 captions of data/projects/example, with the class word "icon" in
place of
the trigger. Every run is then measured with three kinds of prompts about other subjects: with the trigger, with the class
word, and with neither.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from data import DOCS, EXAMPLE
from data.research.experiments.in_memory import MemoryTables
from data.research.experiments.processes import run_all
from data.research.experiments.recipes import COLUMNS, Settings, interval, measure
from data.research.experiments.report import with_table
from data.research.experiments.tables import markdown
from pipeline.project.project import Project

LOG = logging.getLogger("regularisation")
CLASS = "icon"
PER_CAPTION = (1, 2)  # seeds of the regularisation images; previews have seed 0
OTHERS = 20  # prompts with the class word, and as many with neither word
BEFORE = ("images", "captions", "buckets", "latents", "embeddings")
KINDS = ("trigger", "class", "none")
HEAD = ("run", "seeds", "style, trigger", "class word", "neither", "moved, trigger", "class word", "neither", "loss", "cost")
PLAIN = "neither"
# Name -> (settings, steps as a multiple of --steps). The longest runs come first, so that parallel processes end together.
RUNS: dict[str, tuple[Settings, int]] = {
    "regularisation 1, twice the steps": ({"train.data.regularisation": 1.0}, 2),
    "preservation": ({"train.preservation.weight": 1.0}, 1),
    "preservation, every 2nd step": ({"train.preservation.weight": 1.0, "train.preservation.every": 2}, 1),
    "regularisation 1": ({"train.data.regularisation": 1.0}, 1),
    "regularisation 0.25": ({"train.data.regularisation": 0.25}, 1),
    PLAIN: ({}, 1),
}

Row = dict[str, Any]


def settings(name: str, steps: int) -> Settings:
    """Return the project settings of one run: setting name -> value. `name` is the name of the run in `RUNS`. `steps` is
    the number of training steps of the shortest runs in `RUNS`.
    """
    own, times = RUNS[name]
    warmup = Project(EXAMPLE).config.sections["train"].schedule.warmup_steps
    length = {"train.steps": steps * times, "train.checkpoint_every": steps * times}
    return {"train.data.regularisation": 0.0, "train.schedule.decay_steps": steps * times - warmup} | length | own


def prompts() -> dict[str, list[str]]:
    """Return the preview prompts of each kind in `KINDS`: kind -> prompts. "trigger" has the prompts of data/projects/example.
    "class" has the first `OTHERS` of them with the class word in place of the trigger, and "none" has these without either
    word.
    """
    with_trigger: tuple[str, ...] = Project(EXAMPLE).config.sections["captions"].preview_prompts
    subjects = [prompt.removeprefix("{trigger}, ") for prompt in with_trigger]
    return {
        "trigger": list(with_trigger),
        "class": [f"{CLASS}, {subject}" for subject in subjects[:OTHERS]],
        "none": subjects[:OTHERS],
    }


class Bench:
    """What all runs of the experiment share: the tables before `train`, with regularisation images, and the base's pictures
    of all prompts. Files are written below `folder`. `prompts` maps each kind of prompt to its preview prompts.
    """

    def __init__(self, folder: Path, prompts: dict[str, list[str]]) -> None:
        self.folder, self.prompts = folder, prompts
        self.pictures = folder / "pictures"
        shutil.copytree(EXAMPLE / "images", self.pictures)
        self._draw_class()
        self.tables = MemoryTables(folder / "before")
        for name in BEFORE:
            self.tables.run(self._project(), name)
        self.base = self.tables.branch(folder / "base")
        self.base.run(self._project(), "samples")

    def _project(self, more: Settings | None = None) -> Project:
        asked = {"captions.preview_prompts": [each for kind in KINDS for each in self.prompts[kind]]}
        everything = {"images.folder": str(self.pictures), "captions.class_word": CLASS, "samples.first_prompts": 0}
        return Project(EXAMPLE, everything | asked | (more or {}))

    def _draw_class(self) -> None:
        """Draw the regularisation images with the base model. Write them and their captions into the folder `reg` of the
        image folder.
        """
        lines = (EXAMPLE / "images" / "metadata.jsonl").read_text().splitlines()
        asked = [f"{CLASS}, {json.loads(line)['text']}" for line in lines]
        drawing = {"captions.preview_prompts": asked, "samples.seeds": list(PER_CAPTION)}
        tables = MemoryTables(self.folder / "class")
        for name in ("images", "captions", "embeddings", "samples"):
            tables.run(self._project(drawing), name)
        (self.pictures / "reg").mkdir()
        rows = []
        for number, row in enumerate(tables.rows["samples"].to_pylist()):
            shutil.copyfile(tables.files["samples"] / row["path"], self.pictures / "reg" / f"{number}.png")
            rows.append({"file_name": f"{number}.png", "text": row["prompt"]})
        (self.pictures / "reg" / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, chosen: Settings) -> Row:
        """Train with the settings `chosen`, draw all prompts, and return the measurements as a dict. It has one entry for
        each kind of prompt, with the scores of `measure` and "moved". "moved" lists, for each prompt, the mean difference
        from the base's picture, in levels of 255.

        "loss" is the mean over the last fifth of the samples that are no regularisation images. "step_seconds" is the
        median time of a step; other processes that use the device make it longer.
        """
        began = time.monotonic()
        tables = self.tables.branch(Path(tempfile.mkdtemp(dir=self.folder)))
        trained = tables.run(self._project(chosen), "train")
        drawn = tables.run(self._project(chosen | {"samples.base": False}), "samples")
        both = tables.files["samples"]
        shutil.copytree(self.base.files["samples"], both, dirs_exist_ok=True)
        found = {kind: self._measure(tables.branch(tables.folder / kind), kind, both, drawn) for kind in KINDS}
        shutil.rmtree(tables.folder)
        seconds = {"step_seconds": round(float(np.median(trained["seconds"].to_numpy())), 4)}
        return found | self._facts(trained) | seconds | {"seconds": round(time.monotonic() - began, 1)}

    def _facts(self, trained: pa.Table) -> Row:
        """Return facts about a run as a dict. `trained` has the run's rows of the table `train`. "loss" is the mean loss at
        the end of the run. "samples" is the number of samples, and "of_class" is the share of them that are regularisation
        images.
        """
        of_class = {row["image_id"] for row in self.tables.rows["images"].to_pylist() if row["use"] == "regularisation"}
        is_class = np.array([image in of_class for image in trained["image_id"].to_pylist()])
        losses = trained["loss"].to_numpy()[~is_class]
        share = round(float(is_class.mean()), 3)
        return {"loss": round(float(losses[-max(1, len(losses) // 5) :].mean()), 4), "samples": len(is_class), "of_class": share}

    def _measure(self, tables: MemoryTables, kind: str, files: Path, drawn: pa.Table) -> Row:
        """Return the scores of one kind of prompt as a dict. `kind` is one of `KINDS`. `drawn` has the rows of the
        adapter's pictures, and `files` is the folder with all pictures. `tables` is where the stage `scores` runs. The
        class word is cut off each prompt before scoring, because the scores compare with captions that do not have it.
        """
        trigger = Project(EXAMPLE).config.sections["captions"].trigger
        asked = {prompt.replace("{trigger}", trigger): prompt.removeprefix(f"{CLASS}, ") for prompt in self.prompts[kind]}
        rows = [row for row in pa.concat_tables([self.base.rows["samples"], drawn]).to_pylist() if row["prompt"] in asked]
        cut = [row | {"prompt": asked[row["prompt"]] if kind == "class" else row["prompt"]} for row in rows]
        tables.rows["samples"], tables.files["samples"] = pa.Table.from_pylist(cut, schema=drawn.schema), files
        scores = measure(tables.run(self._project(), "scores").to_pylist())
        pairs: dict[str, list[Path]] = defaultdict(list)
        for row in rows:
            pairs[row["prompt"]].append(files / row["path"])
        return scores | {"moved": [round(difference(*pair), 2) for pair in pairs.values()]}


def difference(one: Path, other: Path) -> float:
    """Return the mean absolute difference of two pictures of equal size, in levels of 255."""
    a_HW3, b_HW3 = (np.asarray(Image.open(path).convert("RGB"), np.float64) for path in (one, other))
    return float(np.abs(a_HW3 - b_HW3).mean())


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file of this experiment, one per run."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(rows: list[Row]) -> str:
    """Return the results as a table in Markdown, one line per kind of run, averaged over the seeds. `rows` are the runs.
    Style has a 95 % interval. "moved" has the values of the lowest and the highest seed. "cost" is the training time
    divided by that of the run with neither method; each is the time of the fastest seed.
    """
    runs = {name: own for name in reversed(RUNS) if (own := [row for row in rows if row["run"] == name])}
    plain = min((_train_seconds(row) for row in runs.get(PLAIN, [])), default=np.nan)
    lines = []
    for name, own in runs.items():
        styles = [str(interval([row[kind] for row in own], "style")) for kind in KINDS]
        moved = [[float(np.mean(row[kind]["moved"])) for row in own] for kind in KINDS]
        moves = [f"{np.mean(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in moved]
        loss, cost = np.mean([row["loss"] for row in own]), min(_train_seconds(row) for row in own) / plain
        lines.append((name, str(len(own)), *styles, *moves, f"{loss:.3f}", f"{cost:.2f}"))
    return markdown(HEAD, lines)


def _train_seconds(row: Row) -> float:
    return float(row["step_seconds"] * row["set"]["train.steps"])


_BENCH: list[Bench] = []  # the bench of this worker process


def _work(row: Row, folder: str) -> Row:
    if not _BENCH:
        _BENCH.append(Bench(Path(tempfile.mkdtemp(dir=folder)), prompts()))
    return row | _BENCH[0].run(row["set"] | {"train.seed": row["seed"]})


def main() -> None:
    """Run the experiment and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=300, help="steps of the shortest runs, with the batch of data/projects/example"
    )
    parser.add_argument("--only", default="*", help="names of runs, with wildcards")
    parser.add_argument("--workers", type=int, default=1, help="processes; more than one helps on a GPU")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    done = {(row["run"], row["seed"]) for row in read_rows(asked.out)}
    todo = [
        {"run": name, "seed": seed, "set": settings(name, asked.steps)}
        for seed in range(asked.seeds)
        for name in RUNS
        if fnmatch.fnmatch(name, asked.only) and (name, seed) not in done
    ]
    for row in run_all(_work, todo, asked.out, asked.workers):
        scores = ", ".join(f"{kind} {row[kind][COLUMNS[0]]:.3f}" for kind in KINDS)
        LOG.info("%s, seed %d: style %s; %.4f s a step", row["run"], row["seed"], scores, row["step_seconds"])
    LOG.info("%s", table(read_rows(asked.out)))
    page = DOCS / "experiments" / f"{asked.out.stem}.md"
    if page.exists():
        page.write_text(with_table(page.read_text(), "regularisation", table(read_rows(asked.out))))


if __name__ == "__main__":
    main()
