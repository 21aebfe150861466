"""Edit training works: `micro` learns to paint the background in the colour that a reference shows."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline import runner
from pipeline.api import Project as Api
from pipeline.project.project import Project
from tests import projects

EXAMPLE = projects.ROOT / "data" / "projects" / "example" / "images"
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
lr = 2e-3
batch_size = 8
rank = 16
checkpoint_every = 1000
caption_dropout = 0.0

[train.noise]
base = "high_noise"

[samples]
precision = "float32"
width = 96
height = 96
steps = 8
guidance = 1.0
"""


def recoloured(file: Path, colour: tuple[int, int, int]) -> Image.Image:
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


def score(folder: Path, *settings: str) -> float:
    """The share of held-out pictures whose background has the hue of the reference; the base paints it white."""
    for name in ("images", "captions", "buckets", "latents", "embeddings", "train"):
        runner.run(Project(folder, settings), name, projects.Silent())
    adapter = Api(folder, settings).adapter()
    return float(
        np.mean([
            has_hue(background(adapter.generate(f"a {subject}", seed=1, references=[folder / f"{name}.png"])), colour)
            for subject, (name, colour) in itertools.product(HELD, COLOURS.items())
        ])
    )  # fmt: skip


def background(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image).astype(np.float32)
    corners = [pixels[y, x].reshape(-1, 3) for y in (slice(12), slice(-12, None)) for x in (slice(12), slice(-12, None))]
    return np.asarray(np.median(np.concatenate(corners), axis=0))


def has_hue(found: np.ndarray, wanted: tuple[int, int, int]) -> bool:
    """Whether a colour differs from grey in the direction of another one, and by a seventh of it at least."""
    one, other = (colour - colour.mean() for colour in (found, np.array(wanted, np.float64)))
    length, whole = np.linalg.norm(one), np.linalg.norm(other)
    return bool(length > whole / 7 and one @ other > 0.9 * length * whole)


@pytest.mark.proof(
    "edit training learns to paint the background as the reference shows; a learning rate of 0 does not", long=True
)
def test_a_run_learns_to_paint_the_background_as_the_reference_shows(tmp_path: Path) -> None:
    learned = score(project(tmp_path / "learns"), "train.steps=300")
    still = score(project(tmp_path / "still"), "train.lr=1e-12", "train.steps=2")
    assert learned >= 0.8 and still <= 0.2, (learned, still)
