"""Draw the samples of each step: crop, caption, noise level and noise, all determined by (seed, step, sample)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.dataset import Crop, Dataset
from stages.tuner import draws
from stages.tuner.diffusion.noise import SigmaDistribution, stratified_uniform
from stages.tuner.order import Order


@dataclass(frozen=True)
class Sample:
    """A sample of a training step, before its data are read from disk."""

    number: int  # 0-based place in the step
    epoch: int  # of the sample's batch, from 0
    crop: Crop
    caption_id: str
    dropped: bool  # `caption_id` is the empty caption, or the trigger word alone
    sigma: float  # noise level, from 0 (clean) to 1 (noise)
    class_id: str = ""  # the class caption: the class word replaces the trigger; "" if the step needs none, or none exists


@dataclass(frozen=True)
class TrainingSampler:
    """Samplers with equal attributes draw the same samples in the same step."""

    data: Dataset
    seed: int
    order: Order  # which crops form each batch
    noise: SigmaDistribution
    caption_dropout: float  # probability that a sample gets the caption `data.empty`
    strata: int = 1  # steps in a row that cover the noise levels evenly
    classes_every: int = 0  # class captions are used in every n-th step; 0: never
    reference_dropout: float = 0.0  # share of batches that are trained without their references

    def sizes(self, step: int) -> list[int]:
        """Samples per batch, without drawing them. A batch that mixes shapes is one number."""
        return [self.order.batch_size] * self.order.accumulate

    def step(self, step: int) -> list[list[Sample]]:
        """The samples of a step: one list per batch, or one per shape if a batch mixes shapes."""
        batches: list[list[Sample]] = []
        number = 0
        for at, batch in enumerate(self.order.step(step)):
            batches.append([])
            # Drawn for all samples together, since they share one shape, references included.
            alone = draws.uniform(self.seed, "references", step, at) < self.reference_dropout
            for row in batch.rows:
                crop = self.data.crops[row]
                batches[-1].append(self._sample(step, number, batch.epoch, replace(crop, references=()) if alone else crop))
                number += 1
        return batches

    def _sample(self, step: int, number: int, epoch: int, crop: Crop) -> Sample:
        dropped = draws.uniform(self.seed, "dropout", step, number) < self.caption_dropout
        at = self._caption(step, number, crop)
        sigma = self.noise.sigma(stratified_uniform(self.seed, step, number, self.strata), crop.tokens)
        caption, its_class = (self.data.empty, self.data.empty_class) if dropped else (crop.captions[at], crop.class_of(at))
        needs_class = self.classes_every and step % self.classes_every == 0
        return Sample(number, epoch, crop, caption, dropped, sigma, its_class if needs_class else "")

    def _caption(self, step: int, number: int, crop: Crop) -> int:
        if crop.weights:
            return draws.weighted_choice(crop.weights, self.seed, "caption", step, number)
        return draws.choice(len(crop.captions), self.seed, "caption", step, number)

    def noise_of(self, step: int, sample: Sample, shape: tuple[int, ...]) -> np.ndarray:
        """float32; depends on seed, step and the sample's number alone."""
        return draws.normal(shape, self.seed, "noise", step, sample.number)


def build_sampler(config: TrainConfig, data: Dataset) -> TrainingSampler:
    n = config.noise
    scale = {} if n.scale is None else {"scale": n.scale}
    return TrainingSampler(
        data,
        config.seed,
        Order([crop.shape for crop in data.crops], config.batch_size, config.seed, config.accumulate, data.rates),
        SigmaDistribution(n.base, n.mean, n.std, n.shift, n.shift_factor, **scale),
        config.caption_dropout,
        n.strata,
        config.preservation.every if config.preservation else 0,
        config.data.reference_dropout,
    )
