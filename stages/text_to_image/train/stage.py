"""The stage train: a LoRA by flow matching, on latents and embeddings read from disk. One row per sample drawn or measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from schemas.text_to_image import BUCKETS, CAPTIONS, DRAWINGS, EMBEDDINGS, IMAGES, LATENTS, TRAIN
from stages.hashing import file_sha256
from stages.run import Run
from stages.stage import Stage
from stages.text_to_image.beneath import content_of
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.data import load_dataset
from stages.text_to_image.train.memory import forecast
from stages.text_to_image.train.task import ImageTask
from stages.tuner import checkpoint, loop
from stages.tuner.checkpoint import ADAPTER
from stages.tuner.control import Control
from stages.tuner.loop import wanted_rows
from stages.tuner.replay import remake_checkpoints


def wanted_samples(run: Run[Any]) -> pa.Table:
    """One row per sample that is trained on or measured: step, split ("train" or "validation") and number in the step, from 0."""
    task = ImageTask(run)
    return wanted_rows(task, loop.last_step(task, run.output.stored))


def snapshot(run: Run[Any]) -> pa.Table:
    """What the result depends on: each pair that may be drawn, then facts, with an empty latent_id, the fact as caption_id."""
    data = run.once(load_dataset)
    facts = [("", crop.latent_id, f"rate {crop.rate!r}") for crop in data.crops if crop.rate != 1]
    facts += [("", crop.latent_id, f"weights {list(crop.weights)}") for crop in data.crops if crop.weights]
    facts += [("", crop.latent_id, "held out") for crop in data.held]
    shown = [(crop, number, each) for crop in (*data.crops, *data.held) for number, each in enumerate(crop.references, 1)]
    facts += [("", crop.latent_id, f"reference {number} {each.latent_id}") for crop, number, each in shown]
    if run.config.initial:
        file = run.root / run.config.initial
        if not file.is_file():
            raise ValueError(f"[train] initial: there is no file {file}")
        facts.append(("", file_sha256(file), "initial"))
    content = content_of(run.config.beneath, run.root)
    facts += [("", digest, f"beneath {place} at {strength!r}") for place, (digest, strength) in enumerate(content)]
    rows = [{"latent_id": a, "image_id": b, "caption_id": c} for a, b, c in [*data.pairs(), *facts]]
    return pa.Table.from_pylist(rows)


def train(run: Run[Any]) -> Iterator[pa.RecordBatch]:
    """The rows of each step; those of a step with a checkpoint come after the checkpoint is written."""
    control = Control(run, run.config)  # first, so that a `stop` that appears while tables are read takes effect
    return loop.train(run, ImageTask(run), control)


def repair(run: Run[Any]) -> Iterator[str]:
    """Train again to recreate damaged checkpoints. One stays damaged if training now gives another adapter."""
    if checkpoint.damaged_checkpoints(run.output.artifacts):
        yield from remake_checkpoints(run, ImageTask(run))


STAGE = Stage(
    reads=(LATENTS, EMBEDDINGS, BUCKETS, CAPTIONS, IMAGES),
    optional=(DRAWINGS,),
    writes=TRAIN,
    config=TrainConfig,
    needs=("family", "transformer"),
    wants=wanted_samples,
    run=train,
    computes=loop.computed_rows,
    repair=repair,
    snapshot=snapshot,
    forecast=forecast,
    divisible=False,
    version=2,  # 2: every batch is full
    result=ADAPTER,
)
