"""Runs of the train stage on tiny random weights and tables in memory, as the tests of training use them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa

from pipeline.project.stage_run import Lazy
from schemas.text_to_image import BUCKETS, CAPTIONS, EMBEDDINGS, IMAGES, LATENTS
from stages.models.flux2.transformer import Flux2Config
from stages.text_to_image.families import family
from stages.text_to_image.train.batches import MicroBatch
from stages.text_to_image.train.config import (
    DataConfig,
    LossConfig,
    MaskConfig,
    NoiseConfig,
    PreservationConfig,
    TrainConfig,
    ValidationConfig,
)
from stages.text_to_image.train.stage import STAGE
from stages.text_to_image.train.task import ImageTask
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.config import EmaConfig, OptimizerConfig, ScheduleConfig
from stages.tuner.loop import Loader, load_training
from stages.tuner.step import TrainingStep
from tests import harness
from tests.harness import rows_of
from tests.stages.tuner.toy import StoredRun

TINY = family("tiny")
SIZES = {
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "axes_dims_rope": (4, 4, 4, 4),
    "joint_attention_dim": 24,
    "timestep_guidance_channels": 32,
}
SHAPES = ((64, 64), (96, 64), (64, 64), (64, 96), (96, 64), (64, 64), (96, 64))
TEXT_ROWS = 6
BASE = TrainConfig(steps=7, batch_size=2, rank=2, precision="float32", caption_dropout=0.3, lr=1e-2, checkpoint_every=3)


def weights(folder: Path, *, guidance: bool = False, **sizes: Any) -> Path:
    folder.mkdir(parents=True)
    config = {**TINY.transformer, **SIZES, "guidance_embeds": guidance, **sizes}
    draw = np.random.default_rng(0)
    shapes = Flux2Config.from_dict(config).shapes()
    arrays = {name: mx.array(draw.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)) for name, shape in shapes.items()}
    arrays |= {name: 1 + value / 4 for name, value in arrays.items() if value.ndim == 1}
    mx.save_safetensors(str(folder / "diffusion_pytorch_model.safetensors"), arrays)
    (folder / "config.json").write_text(json.dumps({"_class_name": "Flux2Transformer2DModel", **config}))
    return folder


def words(shape: tuple[int, ...], seed: int) -> list[int]:
    value = mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(mx.bfloat16)
    return np.array(value.view(mx.uint16)).ravel().tolist()


def embedded(seed: int, *caption_ids: str) -> list[dict[str, Any]]:
    shape = (TEXT_ROWS, 24)
    rows = [{"caption_id": caption_id, "tokens": 3, "shape": list(shape)} for caption_id in caption_ids]
    return [row | {"tensor": words(shape, seed + n)} for n, row in enumerate(rows)]


def tables(shapes: tuple[tuple[int, int], ...] = SHAPES) -> dict[str, pa.Table]:
    """An image per shape, each with one latent; every third image has a second caption."""
    places = [
        {"image_id": f"image{n}", "width": w, "height": h, "crop_w": 1.0 * w, "crop_h": 1.0 * h}
        for n, (w, h) in enumerate(shapes)
    ]
    texts = [("caption", f"image{n}", f"text{n}", 0) for n in range(len(shapes))]
    texts += [("caption", f"image{n}", f"other{n}", 1) for n in range(0, len(shapes), 3)]
    texts += [("empty", "", "nothing", 0), ("preview", "", "preview", 0)]
    grids = [[128, h // 16, w // 16] for w, h in shapes]
    encoded = [{"shape": grid, "tensor": words(tuple(grid), n)} for n, grid in enumerate(grids)]
    return tables_of(places, 64, encoded, texts, embedded(100, *(caption_id for _, _, caption_id, _ in texts)))


def tables_of(
    places: list[dict[str, Any]],
    resolution: int,
    latents: list[dict[str, Any]],
    texts: list[tuple[str, str, str, int]],
    embeddings: list[dict[str, Any]],
) -> dict[str, pa.Table]:
    """Tables of images with one crop each. `texts`: role, image_id, caption_id and position."""
    encoded = [
        place | latent | {"latent_id": f"latent{n}"} for n, (place, latent) in enumerate(zip(places, latents, strict=True))
    ]
    return {
        "images": rows_of(IMAGES, *({"path": p["image_id"], "image_id": p["image_id"]} for p in places)),
        "buckets": rows_of(BUCKETS, *(place | {"resolution": resolution} for place in places)),
        "latents": rows_of(LATENTS, *encoded),
        "captions": rows_of(CAPTIONS, *({"role": r, "image_id": i, "caption_id": c, "position": p} for r, i, c, p in texts)),
        "embeddings": rows_of(EMBEDDINGS, *embeddings),
    }


def rich_tables(shapes: tuple[tuple[int, int], ...] = SHAPES) -> dict[str, pa.Table]:
    """The tables with a class caption for every caption, and a mask for every second crop."""
    made = tables(shapes)
    rows = made["captions"].to_pylist()
    classes = [row | {"role": "class", "caption_id": f"class of {row['caption_id']}"} for row in rows if row["role"] == "caption"]
    made["captions"] = rows_of(CAPTIONS, *rows, *classes)
    encoded = embedded(200, *(row["caption_id"] for row in classes))
    made["embeddings"] = rows_of(EMBEDDINGS, *made["embeddings"].to_pylist(), *encoded)
    crops = made["latents"].to_pylist()
    for n, row in enumerate(crops[::2]):
        count = row["width"] * row["height"] // 256
        row["mask"] = np.random.default_rng(n).integers(0, 256, count, dtype=np.uint8).tobytes()
    made["latents"] = rows_of(LATENTS, *crops)
    return made


EVERYTHING = dataclasses.replace(
    BASE,
    steps=6,
    accumulate=2,
    base_bits=8,
    optimizer=OptimizerConfig(kind="adamw8bit"),
    schedule=ScheduleConfig(shape="cosine", warmup_steps=2, decay_steps=4),
    noise=NoiseConfig(base="mode", strata=3),
    loss=LossConfig(kind="pseudo_huber", weight="half_bell"),
    data=DataConfig(repeats={"image1": 0.5}),
    mask=MaskConfig(),
    preservation=PreservationConfig(every=2),
    validation=ValidationConfig(share=0.2, every=2, sigmas=(0.3, 0.7)),
    ema=EmaConfig(),
)


@dataclasses.dataclass
class Run(StoredRun):
    """A run of the stage."""

    transformer: Path
    config: TrainConfig = BASE
    tables: dict[str, pa.Table] = dataclasses.field(default_factory=tables)
    loaded: int = 0
    compared = harness.compared(STAGE.writes)

    def begin(self, stop: Callable[[], bool], **clocks: Any) -> Any:
        return STAGE.run(self.context(stop))

    def context(self, stop: Any = lambda: False) -> Any:
        table = pa.Table.from_batches([STAGE.writes.record_batch(list(self.stored.values()))])
        made = harness.context(STAGE, self.folder, self.tables, config=self.config, family=TINY, stored=table, stop=stop)
        made.needs = Lazy(STAGE.needs, self.need)
        made.report.say = self.said.append
        return made

    def need(self, name: str) -> Any:
        if name == "family":
            return TINY
        self.loaded += 1
        return self.transformer

    def task(self) -> ImageTask:
        return ImageTask(self.context())

    def training(self, start: Checkpoint | None = None) -> TrainingStep:
        return load_training(self.task(), start)

    def micro_batches(self, step: int = 1) -> list[MicroBatch]:
        ((_, batches, _),) = Loader(self.task(), range(step, step + 1))
        return batches
