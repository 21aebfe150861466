"""Measure the loss of held-out pictures as [train.validation] does, with the pictures' captions and with the empty caption."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipeline.project.project import Project
from schemas.text_to_image import CAPTIONS
from stages.text_to_image.train.batches import HeldOutImages
from stages.text_to_image.train.task import ImageTask
from stages.tuner import checkpoint
from stages.tuner.checkpoint import ADAPTER, Checkpoint
from stages.tuner.loop import load_training
from stages.tuner.optimizers.step import Stacks

SIDES = (128, 192)  # pixels: the resolutions of the crops
CAPTION_KINDS = ("own", "empty")  # measured under the picture's caption, and under the empty one
LARGEST_128 = 64  # most image tokens of a crop at 128 px

Row = dict[str, Any]


class HeldOutLoss:
    """Measures the loss of a project's held-out pictures. `project` must have [train.validation]. Its transformer is
    loaded.
    """

    def __init__(self, project: Project) -> None:
        run = project.open("train")
        task = ImageTask(run)
        own = task.held_out
        assert own, "the project has [train.validation]"
        empty = next(row["caption_id"] for row in run.inputs.rows(CAPTIONS).to_pylist() if row["role"] == "empty")
        held = tuple(dataclasses.replace(crop, captions=(empty,)) for crop in own.crops)
        data = dataclasses.replace(task.data, held=held)
        self.images = {"own": own, "empty": HeldOutImages(run, data, own.config, run.config.batch_size)}
        self.training = load_training(task, None)
        self.untrained = self.training.masters

    def measure(
        self,
        saved: Checkpoint | None,
        name: str = ADAPTER,
        kinds: Sequence[str] = CAPTION_KINDS,
        sides: Sequence[int] = SIDES,
    ) -> Iterator[Row]:
        """Measure an adapter and yield one row for each kind of caption and each size of crops, with the mean loss. `saved`
        is the checkpoint, or None for the base. `name` is the file of the checkpoint to load: the adapter or its moving
        average. `kinds` are kinds of captions: "own" or "empty". `sides` are resolutions of crops in pixels.
        """
        self.training.masters = Stacks.of(saved.arrays(name)) if saved else self.untrained
        for kind in kinds:
            losses: dict[int, list[float]] = defaultdict(list)
            for micro in self.images[kind].micro_batches():
                side = SIDES[micro.samples[0].crop.tokens > LARGEST_128]
                if side in sides:
                    losses[side] += self.training.measure(micro)["loss"]
            for side, found in sorted(losses.items()):
                yield {"caption": kind, "side": side, "loss": float(np.mean(found)), "count": len(found)}


def checkpoints(project: Project) -> list[Checkpoint]:
    """Return the checkpoints of a run, ordered by step."""
    return checkpoint.find_checkpoints(project.current("train").folder / "artifacts")[::-1]
