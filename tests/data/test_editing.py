"""Edit training works: `micro` learns to paint the background in the colour that a reference shows."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline import runner
from pipeline.project.project import Project
from tests import projects

pytestmark = pytest.mark.slow

EXAMPLE = projects.ROOT / "data" / "example" / "images"
COLOURS = {
    "blue": (44, 104, 216),
    "yellow": (255, 218, 62),
    "red": (226, 45, 46),
    "green": (46, 160, 67),
    "purple": (130, 60, 190),
}
SIDE = 96  # pixels: 36 tokens
HELD = ("fox", "koala", "penguin")  # subjects that are never trained on
CONFIG = """
[project]
family = "micro"

[images]
references = ["colours"]

[buckets]
resolutions = [96]
upscale = true

[embeddings]
precision = "float32"

[train]
precision = "float32"
steps = 300
lr = 3e-3
batch_size = 8
rank = 16
checkpoint_every = 300
caption_dropout = 0.0

[samples]
precision = "float32"
width = 96
height = 96
steps = 8
guidance = 1.0
"""


def recoloured(file: Path, colour: tuple[int, int, int]) -> Image.Image:
    """The picture with its plain background in another colour."""
    with Image.open(file) as opened:
        image = np.asarray(opened.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)).astype(np.float32)
    near = np.abs(image - image[:4, :4].mean(axis=(0, 1))).max(axis=2, keepdims=True)
    share = np.clip((near - 16) / 24, 0, 1)  # of the subject
    return Image.fromarray((share * image + (1 - share) * np.array(colour)).round().astype(np.uint8))


def project(folder: Path) -> Path:
    """Pairs of a picture and the colour of its background. The captions name the subject alone."""
    (folder / "images" / "colours").mkdir(parents=True)
    files = [file for file in sorted(EXAMPLE.glob("*.webp")) if file.stem not in HELD]
    for (number, file), (name, colour) in itertools.product(enumerate(files), COLOURS.items()):
        stem = f"{file.stem}-{name}"
        recoloured(file, colour).save(folder / "images" / f"{stem}.png")
        (folder / "images" / f"{stem}.txt").write_text(f"a {file.stem.replace('-', ' ')}")
        patch = Image.new("RGB", (64, 64), colour)
        patch.putpixel((number % 64, 0), (0, 0, 0))  # so that no two references have the same bytes
        patch.save(folder / "images" / "colours" / f"{stem}.png")
    for name, colour in COLOURS.items():
        Image.new("RGB", (64, 64), colour).save(folder / f"{name}.png")
    (folder / "project.toml").write_text(CONFIG)
    return folder


def accuracy(folder: Path, *settings: str) -> float:
    """Train, and draw held-out subjects with every reference: the share of backgrounds nearest to the reference's colour."""
    for name in ("images", "captions", "buckets", "latents", "embeddings", "train"):
        runner.run(Project(folder, settings), name, projects.Silent())
    from pipeline.api import Project as Api

    adapter, palette = Api(folder, settings).adapter(), np.array(list(COLOURS.values()), np.float32)
    right = []
    for (at, name), subject in itertools.product(enumerate(COLOURS), HELD):
        drawn = np.asarray(adapter.generate(f"a {subject}", seed=at, references=[folder / f"{name}.png"])).astype(np.float32)
        corners = np.median(np.concatenate([drawn[y, x] for y in (0, -1) for x in (slice(8), slice(-8, None))]), axis=0)
        right.append(int(np.abs(palette - corners).sum(axis=1).argmin()) == at)
    return float(np.mean(right))


def test_a_short_run_learns_to_paint_the_background_as_the_reference_shows(tmp_path: Path) -> None:
    assert accuracy(project(tmp_path / "learns")) >= 0.8


def test_a_learning_rate_near_0_does_not_pass_as_learning_to_edit(tmp_path: Path) -> None:
    assert accuracy(project(tmp_path / "still"), "train.lr=1e-12", "train.steps=20") <= 0.4
