"""The map by which `make evaluate` asks whether a picture shows what its text says.

    python -m data.micro.training.agreement WORK_DIR OUT.safetensors

fits a ridge regression from the features of pictures (EfficientNet-Lite0) to the sentence embeddings (MiniLM) of their plain
captions, on sprites of the split "base" in both styles and on all other 3D emoji that may be seen, in many sizes on many
backgrounds, so that it hears the background too: 5 to 10 minutes on a CPU. Then it ranks the captions of the held-out
concepts, which it never saw, by their real pictures, and says how well.

N pictures, D picture features, E sentence embedding.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from data.micro.training.captions import phrase
from data.micro.training.compose import COLOURS, SHAPES, load_splits
from data.micro.training.example import SCALE, Sprites, arguments, concepts, held_out, said
from stages.text_to_image.scores.features import PICTURES, TEXTS, Agreement, ImageEncoder, sentences

PENALTY = 2000.0  # 600 to 4000 do as well on concepts of the base's split that are left out
EACH = 5  # pictures of a concept in a style
MORE = 2  # pictures of each other 3D emoji: the features know flat pictures better
STYLES = ("flat", "3d")
AT = (1, 5, 10)


def pictures(work: Path, eye: ImageEncoder) -> tuple[np.ndarray, list[str]]:
    """Features (N,D) of composed pictures, and their captions."""
    draw = random.Random(0)
    shapes = [(width, height) for resolution in SHAPES.values() for height, width in resolution]
    rows, texts = [], []
    for style in STYLES:
        sprites = Sprites.load(work, style)
        chosen = [(concept, EACH) for concept in concepts("base") if concept["name"] in sprites.names]
        for concept, count in [*chosen, *((concept, MORE) for concept in others(work) if style == "3d")]:
            for colour in draw.sample(list(COLOURS), count):
                image = sprites.picture(concept["name"], colour, draw.choice(shapes), draw.uniform(*SCALE))
                rows.append(eye.see(image))
                texts.append(said(concept, colour))
    return np.stack(rows), texts


def others(work: Path) -> list[dict[str, str]]:
    """The 3D emoji that may be seen and are no concept of any split."""
    known = {concept["name"] for split in ("base", "example", "held-out") for concept in concepts(split)}
    free = (name for name, split in load_splits(work / "sprites.zip").items() if split == "base")
    return [{"name": name, "phrase": phrase(name)} for name in free if name not in known]


def fit(features_ND: np.ndarray, said_NE: np.ndarray) -> dict[str, np.ndarray]:
    """The ridge regression's parts, by their names in the file."""
    mean_D, scale_D, text_E = features_ND.mean(0), features_ND.std(0) + 1e-8, said_NE.mean(0)
    x_ND = (features_ND - mean_D) / scale_D
    weight_DE = np.linalg.solve(x_ND.T @ x_ND + PENALTY * np.eye(x_ND.shape[1]), x_ND.T @ (said_NE - text_E))
    single = {"mean": mean_D, "scale": scale_D, "text": text_E}
    return {name: array.astype(np.float32) for name, array in single.items()} | {"weight": weight_DE.astype(np.float16)}


def report(work: Path, file: Path, eye: ImageEncoder) -> list[str]:
    """How real pictures of held-out concepts rank their own captions: a line for each style, and chance."""
    agreement = Agreement.load(file)
    lines = [f"{'':8}" + "".join(f"   R@{k:<3}" for k in AT) + "mean rank  cosine"]
    solid = held_out(Sprites.load(work, "3d"))
    colours = {concept["name"]: colour for concept, colour, _ in solid}
    for style in STYLES:
        sprites = Sprites.load(work, style)
        shown = [
            (c, colours[c["name"]], sprites.picture(c["name"], colours[c["name"]], i.size, sum(SCALE) / 2)) for c, _, i in solid
        ]
        texts_NE = sentences([said(concept, colour) for concept, colour, _ in shown])
        cosines_NN = np.stack([agreement.cosines(eye.see(image), texts_NE) for *_, image in shown])
        own_N = np.diag(cosines_NN)
        ranks_N = 1 + (cosines_NN > own_N[:, None]).sum(axis=1)
        cells = "".join(f"{np.mean(ranks_N <= k):8.2f}" for k in AT)
        lines.append(f"{style:8}{cells}{ranks_N.mean():10.1f}{own_N.mean():8.3f}")
    count = len(solid)
    return [*lines, f"{'chance':8}" + "".join(f"{k / count:8.2f}" for k in AT) + f"{(count + 1) / 2:10.1f}{0:8.3f}"]


def main(work: Path, file: Path) -> str:
    """Fit, write, and say how good it is."""
    eye = ImageEncoder()
    features_ND, texts = pictures(work, eye)
    distinct = sorted(set(texts))
    place = {text: n for n, text in enumerate(distinct)}
    said_NE = sentences(distinct)[[place[text] for text in texts]]
    told = {"pictures": PICTURES.identity(), "texts": TEXTS.identity(), "fitted": f"{len(texts)} pictures, penalty {PENALTY:g}"}
    save_file(fit(features_ND, said_NE), file, told)
    return "\n".join([f"{file}: fitted to {len(texts)} pictures, {file.stat().st_size} bytes", *report(work, file, eye)])


if __name__ == "__main__":
    sys.stdout.write(main(*arguments(__doc__, 2)) + "\n")
