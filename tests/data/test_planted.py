"""Three bad images among those of the example, trained on `micro`: a wrong caption, noise, another kind of picture. `hurting`
finds them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.commands.query import answer
from pipeline.project.project import Project
from tests import projects

EXAMPLE = projects.ROOT / "data" / "projects" / "example" / "images"
CONFIG = """
[project]
family = "micro"

[captions]
trigger = "ohwx"
template = "{{trigger}}, {{caption}}"

[buckets]
resolutions = [128]

[embeddings]
precision = "float32"

[train]
precision = "float32"
steps = {steps}
lr = 3e-3
batch_size = {batch_size}
seed = {seed}
checkpoint_every = {steps}
"""


def plant(folder: Path, seed: int, steps: int, batch_size: int, count: int) -> set[str]:
    """Write a project of `count` images with three bad ones, and return their names; the seed decides which become bad."""
    shutil.copytree(EXAMPLE, folder / "images")
    (folder / "project.toml").write_text(CONFIG.format(steps=steps, batch_size=batch_size, seed=seed))
    file = folder / "images" / "metadata.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows[count:]:
        (folder / "images" / row["file_name"]).unlink()
    rows = rows[:count]
    draw = np.random.default_rng(seed)
    wrong, noise, other = (rows[n] for n in draw.permutation(len(rows))[:3])
    wrong["text"] = "a hammer on a yellow background"
    Image.fromarray(draw.integers(0, 256, (256, 256, 3), dtype=np.uint8)).save(
        folder / "images" / noise["file_name"], lossless=True
    )
    photo = sorted((projects.MATERIAL / "images").glob("photo_*.jpg"))[seed]
    with Image.open(photo) as image:
        image.convert("RGB").resize((256, 192)).save(folder / "images" / other["file_name"], lossless=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {row["file_name"] for row in (wrong, noise, other)}


@pytest.mark.proof("`hurting` finds three bad images of 24 that were planted")
def test_hurting_finds_planted_bad_images(tmp_path: Path, cases: Callable[[int, int], int]):
    found = []
    seeds = cases(1, 5)
    for seed in range(seeds):
        folder = tmp_path / str(seed)
        planted = plant(folder, seed, *((300, 4, 24) if seeds > 1 else (8, 2, 8)))
        projects.build(folder, "images", "captions", "buckets", "latents", "embeddings", "train")
        order = {name: f"select path from hurting order by {name} desc limit 3" for name in ("excess", "raw_loss")}
        first = {name: set(answer(Project(folder), sql)["path"].to_pylist()) for name, sql in order.items()}
        found.append([len(planted & paths) / 3 for paths in first.values()])
    corrected, raw = np.mean(found, axis=0)
    assert corrected >= 0.9 and corrected >= raw, found
