"""Measure the view `hurting`: plant three bad images among 40, train `micro`, and see whether their losses give them
away.

    python -m data.research.experiments.hurting OUT [--seeds 5] [--steps 300] [--workers N]

adds one JSON line per seed to the file OUT. Seeds that OUT has already are left out, so a stopped experiment goes on. A
seed draws 40 pictures of data/projects/example and its references, which have one style. Three of them become bad: one gets the
caption of another picture, one becomes noise, and one is replaced by a photograph or a print with its own caption.
`precision` is the share of bad images among the first three by the view's `excess`; `precision_raw` among the first
three by the raw mean loss.

The view is computed in memory here, on the rows that training yields, so the experiment also runs on machines without
DuckDB. A test compares both.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from data import DATA, EXAMPLE
from data.research.experiments.in_memory import MemoryTables
from data.research.experiments.processes import run_all
from pipeline.project.project import Project

LOG = logging.getLogger("hurting")
OTHERS = sorted((DATA.parent / "tests" / "material" / "images").glob("[ps]*.jpg"))  # photographs, and prints of nature
STAGES = ("images", "captions", "buckets", "latents", "embeddings", "train")
IMAGES = 40
BAD = ("wrong caption", "noise", "other subject")
SIDE = 256  # pixels of a picture
LEVEL, TIME = 50, 100  # neighbours on either side, by noise level and by step, as in the view

Row = dict[str, Any]


def plant(folder: Path, seed: int) -> dict[str, str]:
    """Write 40 pictures and their captions into `folder`, three of them bad. Return a dict from the file name of each bad
    picture to what is wrong with it. `seed` chooses the pictures.
    """
    random = np.random.default_rng(seed)
    pool = [(source / row["file_name"], row["text"]) for source in _sources() for row in _lines(source / "metadata.jsonl")]
    chosen = [pool[place] for place in random.permutation(len(pool))[: IMAGES + 1]]
    *chosen, (_, foreign) = chosen  # the caption of a picture that is not in the set
    rows, bad = [], dict[str, str]()
    for place, (file, text) in enumerate(chosen):
        name = f"{file.stem}.png"
        wrong = BAD[place] if place < len(BAD) else ""
        if wrong == "other subject":
            file = OTHERS[random.integers(len(OTHERS))]
            text = file.with_suffix(".txt").read_text().strip()
        with Image.open(file) as opened:
            picture = opened.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)
        if wrong == "noise":
            picture = Image.fromarray(random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
        if wrong == "wrong caption":
            text = foreign
        picture.save(folder / name)
        rows.append({"file_name": name, "text": text})
        bad |= {name: wrong} if wrong else {}
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return bad


def _sources() -> tuple[Path, Path]:
    return EXAMPLE / "images", EXAMPLE / "references"


def _lines(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def without_neighbours(values: np.ndarray, order: np.ndarray, near: int) -> np.ndarray:
    """Subtract from each value the mean of its neighbours, and return the differences in the order of `values`. `order`
    sorts the values. The neighbours are the `near` values before and the `near` values after it in that order. The value
    itself is not part of the mean.
    """
    sorted_values = values[order]
    sums = np.concatenate([[0.0], np.cumsum(sorted_values)])
    place = np.arange(len(values))
    first, end = np.maximum(place - near, 0), np.minimum(place + near + 1, len(values))
    means = (sums[end] - sums[first] - sorted_values) / (end - first - 1)
    result = np.empty_like(values)
    result[order] = sorted_values - means
    return result


def excess(rows: pa.Table) -> dict[str, tuple[float, float]]:
    """Return the scores that the view `hurting` computes for each image: image_id -> (excess, mean loss). `rows` are rows
    of the table `train`.
    """
    loss = rows["loss"].to_numpy().astype(np.float64)
    used = np.isfinite(loss) & (loss > 0) & (rows["split"].to_numpy(zero_copy_only=False) == "train")
    loss = loss[used]
    images, step, sigma = (rows[name].to_numpy(zero_copy_only=False)[used] for name in ("image_id", "step", "sigma"))
    above = without_neighbours(np.log(loss), np.lexsort((images, step, sigma)), LEVEL)
    above = without_neighbours(above, np.lexsort((images, sigma, step)), TIME)
    weight = sigma.astype(np.float64) ** 2
    found = {}
    for each in np.unique(images):
        own = images == each
        found[str(each)] = float((weight * above)[own].sum() / weight[own].sum()), float(loss[own].mean())
    return found


def run(seed: int, steps: int) -> Row:
    """Plant three bad images, train for `steps` steps, and return a row of results: the precision, and the rank of every
    bad image. `seed` chooses the pictures and seeds the training.
    """
    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder, "pictures")
        pictures.mkdir()
        bad = plant(pictures, seed)
        settings = {"images.folder": str(pictures), "train.seed": seed, "train.steps": steps, "train.checkpoint_every": steps}
        schedule = Project(EXAMPLE).config.sections["train"].schedule
        falls = {"shape": schedule.shape, "warmup_steps": schedule.warmup_steps, "decay_steps": steps - schedule.warmup_steps}
        project, tables = Project(EXAMPLE, settings | {"train.schedule": falls}), MemoryTables(Path(folder, "tables"))
        for name in STAGES:
            tables.run(project, name)
        paths = {row["image_id"]: row["path"] for row in tables.rows["images"].select(["image_id", "path"]).to_pylist()}
        found = {paths[image]: values for image, values in excess(tables.rows["train"]).items()}
    return {"seed": seed, "steps": steps, "images": len(found), **dict(_precision(found, bad))}


def _work(row: Row, folder: str) -> Row:
    return run(row["seed"], row["steps"])


def _precision(found: dict[str, tuple[float, float]], bad: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for column, ending in ((0, ""), (1, "_raw")):
        order = sorted(found, key=lambda name: -found[name][column])
        yield f"precision{ending}", sum(name in bad for name in order[: len(bad)]) / len(bad)
        yield f"ranks{ending}", {wrong: order.index(name) + 1 for name, wrong in bad.items()}


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=1, help="processes; more than one helps on a GPU")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    lines = asked.out.read_text().splitlines() if asked.out.exists() else []
    done = {row["seed"] for row in map(json.loads, lines)}
    todo = [{"seed": seed, "steps": asked.steps} for seed in range(asked.seeds) if seed not in done]
    for row in run_all(_work, todo, asked.out, asked.workers):
        LOG.info("seed %d: precision %.2f, of the raw mean %.2f", *(row[key] for key in ("seed", "precision", "precision_raw")))


if __name__ == "__main__":
    main()
