"""Fit the map by which the experiments measure whether a picture shows what its text says.

    python -m data.research.micro.agreement WORK_DIR OUT.safetensors

Fits a ridge regression from the image features of pictures (EfficientNet-Lite0) to the sentence embeddings (all-MiniLM-L6-v2)
of their captions: sprites of the split "base" in both styles and all other 3D emoji of that split, in many sizes on many
backgrounds, so that the map predicts the background too. Half of the 3D pictures have the studio light of
data/projects/example, so that
its pictures are read as well as flat ones. Takes 5 to 10 minutes on a CPU. Then it ranks the captions of the
held-out concepts, which the fit never used, by their real pictures, and prints how often each caption comes first. Needs what
data/research/judges/texts.py needs.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from data.research.experiments.agreement import AgreementMap
from data.research.judges import texts as sentences
from data.research.micro.captions import phrase
from data.research.micro.compose import COLOURS, SHAPES, load_splits
from data.research.micro.example import SCALE, Sprites, arguments, caption_of, concepts, held_out
from stages.text_to_image.scores import ImageEncoder

PENALTY = 2000.0  # 600 to 4000 do as well on concepts of the base's split that are left out
EACH = 5  # pictures of a concept in a style
MORE = 2  # pictures of each other 3D emoji, since the features separate flat pictures better
STYLES = ("flat", "3d")
LIT = 0.5  # share of the 3D pictures with the light of data/projects/example
AT = (1, 5, 10)


def pictures(work: Path, encoder: ImageEncoder) -> tuple[np.ndarray, list[str]]:
    """Compose the pictures to fit on, and return their features (pictures, 1280) and their captions. `work` is WORK_DIR.
    `encoder` computes the features.
    """
    draw = random.Random(0)
    shapes = [(width, height) for resolution in SHAPES.values() for height, width in resolution]
    rows, captions = [], []
    for style in STYLES:
        sprites = Sprites.load(work, style)
        chosen = [(concept, EACH) for concept in concepts("base") if concept["name"] in sprites.names]
        for concept, count in [*chosen, *((concept, MORE) for concept in other_emoji(work) if style == "3d")]:
            for colour in draw.sample(list(COLOURS), count):
                compose = sprites.render if style == "3d" and draw.random() < LIT else sprites.picture
                image = compose(concept["name"], colour, draw.choice(shapes), draw.uniform(*SCALE))
                rows.append(encoder.encode(image))
                captions.append(caption_of(concept, colour))
    return np.stack(rows), captions


def other_emoji(work: Path) -> list[dict[str, str]]:
    """Return the 3D emoji of the split "base" that are not used as concepts. Each is a dict with "name" and "phrase"."""
    known = {concept["name"] for split in ("base", "example", "held-out") for concept in concepts(split)}
    free = (name for name, split in load_splits(work / "sprites.zip").items() if split == "base")
    return [{"name": name, "phrase": phrase(name)} for name in free if name not in known]


def fit(features_ND: np.ndarray, texts_NE: np.ndarray) -> dict[str, np.ndarray]:
    """Fit the ridge regression from features (pictures, 1280) to embeddings (pictures, 384); returns the arrays of the file."""
    mean_D, scale_D, text_E = features_ND.mean(0), features_ND.std(0) + 1e-8, texts_NE.mean(0)
    x_ND = (features_ND - mean_D) / scale_D
    weight_DE = np.linalg.solve(x_ND.T @ x_ND + PENALTY * np.eye(x_ND.shape[1]), x_ND.T @ (texts_NE - text_E))
    single = {"mean": mean_D, "scale": scale_D, "text": text_E}
    return {name: array.astype(np.float32) for name, array in single.items()} | {"weight": weight_DE.astype(np.float16)}


def report(work: Path, file: Path, encoder: ImageEncoder) -> list[str]:
    """Return the lines of a table that tests the map in `file`. For each style, it says how high real pictures of held-out
    concepts rank their own captions. A last line has the values of chance. `work` is WORK_DIR.
    """
    agreement = AgreementMap.load(file)
    lines = [f"{'':8}" + "".join(f"   R@{k:<3}" for k in AT) + "mean rank  cosine"]
    solid = held_out(Sprites.load(work, "3d"))
    colours = {concept["name"]: colour for concept, colour, _ in solid}
    for style in (*STYLES, "lit 3d"):
        sprites = Sprites.load(work, style.removeprefix("lit "))
        compose = sprites.render if style.startswith("lit") else sprites.picture
        shown = [(c, colours[c["name"]], compose(c["name"], colours[c["name"]], i.size, sum(SCALE) / 2)) for c, _, i in solid]
        texts_NE = sentences.encode([caption_of(concept, colour) for concept, colour, _ in shown])
        cosines_NN = np.stack([agreement.cosines(encoder.encode(image), texts_NE) for *_, image in shown])
        own_N = np.diag(cosines_NN)
        ranks_N = 1 + (cosines_NN > own_N[:, None]).sum(axis=1)
        cells = "".join(f"{np.mean(ranks_N <= k):8.2f}" for k in AT)
        lines.append(f"{style:8}{cells}{ranks_N.mean():10.1f}{own_N.mean():8.3f}")
    count = len(solid)
    return [*lines, f"{'chance':8}" + "".join(f"{k / count:8.2f}" for k in AT) + f"{(count + 1) / 2:10.1f}{0:8.3f}"]


def main(work: Path, file: Path) -> str:
    """Fit the map and write it to `file`. Return the report on the held-out concepts. `work` is WORK_DIR."""
    encoder = ImageEncoder.load()
    features_ND, captions = pictures(work, encoder)
    distinct = sorted(set(captions))
    place = {text: number for number, text in enumerate(distinct)}
    texts_NE = sentences.encode(distinct)[[place[text] for text in captions]]
    about = {
        "images_sha256": encoder.source_sha256,
        "texts_sha256": sentences.SOURCE_SHA256,
        "fitted": f"{len(captions)} pictures, penalty {PENALTY:g}",
    }
    save_file(fit(features_ND, texts_NE), file, about)
    lines = report(work, file, encoder)
    return "\n".join([f"{file}: fitted to {len(captions)} pictures, {file.stat().st_size} bytes", *lines])


if __name__ == "__main__":
    sys.stdout.write(main(*arguments(__doc__, 2)) + "\n")
