"""Measuring a run on images that were held out: what is read and which rows are written, at which steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from schemas.text_to_image.embeddings import EMBEDDINGS
from schemas.text_to_image.latents import LATENTS
from schemas.text_to_image.train import TRAIN
from stages.stage import StageContext
from stages.text_to_image.train.dataset import Crop
from stages.text_to_image.train.loader import MicroBatch, Sample, read
from stages.text_to_image.train.selection import ValidationConfig
from stages.tuner import validation


class Validation:
    """The held-out rows as samples: the same noise and the same levels at every measurement."""

    def __init__(self, crops: Sequence[Crop], config: ValidationConfig, batch_size: int, mask_floor: float = 0.0) -> None:
        self.crops, self.config, self.mask_floor = crops, config, mask_floor
        shapes = [(crop.width, crop.height) for crop in crops]
        self.batches = validation.batches(shapes, config.sigmas, batch_size)
        self.count = len(crops) * len(config.sigmas)  # samples of one measurement

    def due(self, step: int) -> bool:
        """Whether to measure the adapter as it is after that step; 0: before the first."""
        return step % self.config.every == 0

    def samples(self) -> list[list[Sample]]:
        """One measurement, micro-batch by micro-batch: every crop, with its first caption, at every level."""
        drawn = [(self.crops[row], float(np.float32(sigma))) for batch in self.batches for row, sigma in batch]
        made = iter([Sample(n, 0, crop, crop.captions[0], False, sigma) for n, (crop, sigma) in enumerate(drawn)])
        return [[next(made) for _ in batch] for batch in self.batches]

    def load(self, ctx: StageContext) -> Iterator[MicroBatch]:
        """The same, read from disk one after the other, by readers of its own: a Loader's let go of pages at their own pace."""
        latents, embeddings = ctx.tensors(LATENTS), ctx.tensors(EMBEDDINGS)
        for samples in self.samples():
            yield read(samples, latents, embeddings, self.noise_of, self.mask_floor)

    def noise_of(self, sample: Sample, shape: tuple[int, ...]) -> np.ndarray:
        """A crop's noise, the same at every level."""
        return validation.noise(shape, self.config.seed, sample.crop.latent_id)

    def wanted(self, last: int) -> pa.Table:
        """(step, split, sample) of every measurement of a run that ends at that step."""
        steps = np.array(validation.steps(self.config.every, last), np.int32)
        numbers = np.tile(np.arange(self.count, dtype=np.int32), len(steps))
        split = pa.array(["validation"] * len(numbers), TRAIN.batch.field("split").type)
        return pa.table({"step": np.repeat(steps, self.count), "split": split, "sample": numbers})

    def means(self, rows: pa.Table) -> dict[int, float]:
        """The mean loss of each whole measurement among rows of the table train."""
        columns = (rows[name].to_pylist() for name in ("split", "step", "loss"))
        found = [(step, loss) for split, step, loss in zip(*columns, strict=True) if split == "validation"]
        return validation.means(found, self.count)

    def ends(self, rows: pa.Table, steps: int) -> int:
        """The last of a run's steps, as far as these rows of the table train say: `patience` may end it before `steps`."""
        if self.config.patience is None:
            return steps
        found = validation.stops_at(self.means(rows), self.config.every, self.config.patience, self.config.min_delta)
        return steps if found is None else min(found, steps)

    def best(self, rows: pa.Table, last: int | None = None) -> int | None:
        """The step with the lowest mean loss among rows of the table train, up to `last`; None without any but the start."""
        return validation.best({step: mean for step, mean in self.means(rows).items() if last is None or step <= last})
