"""Tables and weights of the tiny family, with which the tests draw previews."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa
from PIL import Image

from schemas.text_to_image import CAPTIONS, EMBEDDINGS
from stages.hashing import text_sha256
from stages.run import Run
from stages.text_to_image.families import family
from stages.text_to_image.samples.config import SamplesConfig
from stages.text_to_image.samples.stage import STAGE
from tests import harness
from tests.harness import rows_of

TINY = family("tiny")
PROMPTS = ("a red fox", "a sleeping cat, 猫")
SIZE = 32
STEPS = 3
CONFIG = SamplesConfig(checkpoints="all", seeds=(0, 5), width=SIZE, height=SIZE, steps=STEPS, precision="float32")
TOKENS = 6


def tables(last_step: int = 20) -> dict[str, pa.Table]:
    captions, embeddings = [], []
    draw = np.random.default_rng(0)
    for role, texts in (("empty", [""]), ("preview", PROMPTS), ("caption", ["of an image"])):
        for position, text in enumerate(texts):
            key = {"caption_id": text_sha256(text)}
            captions.append(key | {"role": role, "text": text, "position": position})
            values = mx.array(draw.standard_normal((TOKENS, TINY.transformer["joint_attention_dim"]), np.float32))
            words = np.array(values.astype(mx.bfloat16).view(mx.uint16))
            embeddings.append(key | {"tokens": 3, "shape": list(words.shape), "dtype": "bfloat16", "tensor": words.ravel()})
    return {
        "captions": rows_of(CAPTIONS, *captions[::-1]),
        "embeddings": rows_of(EMBEDDINGS, *embeddings),
        "train": pa.table({"step": pa.array([last_step], pa.int32())}),
    }


def context(root: Path, folder: Path, config: SamplesConfig = CONFIG, last_step: int = 20, **given: Any) -> Run:
    places = {
        "transformer": root / "weights" / "transformer",
        "autoencoder": root / "weights" / "vae",
        "train": root / "train",
    }
    return harness.context(STAGE, folder, tables(last_step), **({"config": config, "family": TINY, "weights": places} | given))


def pixels(run: Run[Any], row: dict[str, Any]) -> np.ndarray:
    with Image.open(run.output.artifacts / row["path"]) as image:
        return np.asarray(image).astype(np.float32)
