"""Measure how sharp micro's pictures are, and how near to real ones.

    python -m data.research.micro.sharpness WORK_DIR WEIGHTS...

draws the held-out concepts with each folder of WEIGHTS, without an adapter, with two seeds, and compares them with real flat
pictures of the same concepts on the same colours (WORK_DIR/sprites.zip). Prints per folder:

- edge energy: the mean length of the gradient of the brightness, as a share of the real pictures'; 1 is as sharp as they are;
- distance: the kernel distance (KID, cubic kernel, unbiased) between the features of the judge (EfficientNet-Lite0), times
  1000; smaller is nearer. A Fréchet distance would need thousands of pictures.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from data import EXAMPLE
from data.research.experiments.in_memory import MemoryTables
from data.research.micro.example import SCALE, SQUARE, Sprites, arguments, backgrounds, caption_of, concepts
from pipeline.project.project import Project
from stages.text_to_image.scores import ImageEncoder

LOG = logging.getLogger("sharpness")
SEEDS = (0, 1)


def real_pictures(work: Path) -> dict[str, Image.Image]:
    """Return caption -> real flat picture of each held-out concept, 128 x 128 px."""
    sprites, chosen = Sprites.load(work, "flat"), concepts("held-out")
    colours = backgrounds(chosen, sprites, seed=0)
    middle = sum(SCALE) / 2
    return {
        caption_of(one, colours[one["name"]]): sprites.picture(one["name"], colours[one["name"]], SQUARE, middle)
        for one in chosen
    }


def drawn_pictures(weights: Path, prompts: list[str], folder: Path) -> list[Image.Image]:
    """Draw each of `prompts` with the base model in the folder `weights`, once per seed, and return the pictures. `folder`
    is for temporary files.
    """
    settings = {
        "project.weights": str(weights.resolve()),
        "captions.preview_prompts": prompts,
        "samples.first_prompts": 0,
        "samples.seeds": list(SEEDS),
        "samples.guidance": 3.0,
    }
    tables, project = MemoryTables(folder), Project(EXAMPLE, settings)
    for name in ("images", "captions", "embeddings", "samples"):
        tables.run(project, name)
    return [Image.open(tables.files["samples"] / path).convert("RGB") for path in tables.rows["samples"]["path"].to_pylist()]


def edge_energy(images: list[Image.Image]) -> float:
    """Return the mean length of the gradient of the brightness over all pixels, in levels per pixel."""
    lengths = []
    for image in images:
        grey_HW = np.asarray(image.convert("L"), np.float64)
        lengths.append(np.hypot(*np.gradient(grey_HW)).mean())
    return float(np.mean(lengths))


def kernel_distance(one_ND: np.ndarray, other_MD: np.ndarray) -> float:
    """Return the squared maximum mean discrepancy of two sets of features: the unbiased estimate with the kernel (x y / D +
    1)^3. `one_ND` and `other_MD` hold one feature vector per row. The features are scaled by the mean length of the second
    set's.
    """
    scale = np.sqrt(other_MD.shape[1]) / np.linalg.norm(other_MD, axis=1).mean()
    x, y = one_ND * scale, other_MD * scale
    xx, yy, xy = ((a @ b.T / a.shape[1] + 1) ** 3 for a, b in ((x, x), (y, y), (x, y)))
    n, m = len(x), len(y)
    return float((xx.sum() - np.trace(xx)) / (n * (n - 1)) + (yy.sum() - np.trace(yy)) / (m * (m - 1)) - 2 * xy.mean())


def main() -> None:
    """Measure every folder of the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    work, *folders = arguments(__doc__, max(2, len(sys.argv) - 1))
    encoder, real = ImageEncoder.load(), real_pictures(work)
    real_ND, sharp = np.stack([encoder.encode(image) for image in real.values()]), edge_energy(list(real.values()))
    for weights in folders:
        with tempfile.TemporaryDirectory() as folder:
            images = drawn_pictures(weights, list(real), Path(folder))
        features_ND = np.stack([encoder.encode(image) for image in images])
        row = {
            "weights": weights.name,
            "edge_energy": edge_energy(images) / sharp,
            "distance": 1e3 * kernel_distance(features_ND, real_ND),
        }
        LOG.info(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}))


if __name__ == "__main__":
    main()
