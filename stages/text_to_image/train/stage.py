"""The stage train: a LoRA by flow matching, on latents and embeddings read from disk. One row per sample drawn or measured."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from schemas.text_to_image import BUCKETS, CAPTIONS, DRAWINGS, EMBEDDINGS, IMAGES, LATENTS, TRAIN
from stages.hashing import file_sha256
from stages.run import Run
from stages.stage import Columns, Stage
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
from stages.tuner.validation import TRAIN as TRAINED


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
    facts += [("", str(resolution), f"from step {first}") for first, resolution in data.parts]
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


def seconds(run: Run[Any], coming: pa.Table, last: Columns, mean: float | None) -> float | None:
    """Of a progressive run, by what steps of each resolution took; None if one of those to come has not been computed yet."""
    parts = run.once(load_dataset).parts
    if not parts:
        return None if mean is None else coming.num_rows * mean
    resolutions = {crop.latent_id: crop.resolution for crop in run.once(load_dataset).crops}
    costs: dict[Any, dict[Any, float]] = defaultdict(dict)  # by resolution or split, by step or batch
    counts: Counter[Any] = Counter()
    for row in last(["step", "split", "latent_id", "seconds"]).to_pylist():
        kind = resolutions.get(row["latent_id"]) if row["split"] == TRAINED else row["split"]
        costs[kind][row["step"], row["seconds"]] = row["seconds"]
        counts[kind] += 1
    means = {kind: sum(own.values()) / counts[kind] for kind, own in costs.items()}
    total = 0.0
    for row in coming.select(["step", "split"]).to_pylist():
        part = max(part for part in parts if part[0] <= max(row["step"], 1))
        kind = part[1] if row["split"] == TRAINED else row["split"]
        if kind not in means:
            return None
        total += means[kind]
    return total


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
    seconds=seconds,
    divisible=False,
    version=2,  # 2: every batch is full
    result=ADAPTER,
)
