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
    """One sample of a training step, before its data are read from disk. `number` is its index in the step, from 0.
    `crop` is the latent to read. `caption_id` is the caption to read. `sigma` is the noise level, from 0 (clean) to 1
    (noise).

    `epoch` is the epoch of the sample's batch, from 0. `dropped` is True if the image's own caption was left out at
    random; `caption_id` is then the empty caption or the trigger word alone. `class_id` is the class caption to read,
    or "" for none. A class caption has the class word in place of the trigger word.
    """

    number: int  # 0-based place in the step
    epoch: int
    crop: Crop
    caption_id: str
    dropped: bool
    sigma: float
    class_id: str = ""  # the class caption: the class word replaces the trigger; "" if the step needs none, or none exists


@dataclass(frozen=True)
class TrainingSampler:
    """A sampler that draws the samples of every training step from the dataset `data`. `seed` makes the draws
    repeatable. `order` decides which crops (parts of images) form each batch. `noise` is the distribution from which
    the noise level of each sample is drawn. `caption_dropout` is the probability that a sample gets the caption
    `data.empty`. `strata` is the number of parts into which the distribution is divided, so that successive steps use
    all parts. With `strata` = 4, the first samples of steps 1 to 4 get noise levels from four different quarters of the
    distribution.

    The parts have equal probability. What holds for the first sample of a step also holds for the second, and so on.
    Steps 5 to 8 again use all four quarters. With `strata` = 1, every noise level is drawn independently. A class
    caption has the class word in place of the trigger word. Class captions are used in every `classes_every`-th step.
    If `classes_every` is 0, they are never used. `reference_dropout` is the probability that a batch is trained without
    its references. Samplers with equal attributes draw the same samples in the same step.
    """

    data: Dataset
    seed: int
    order: Order
    noise: SigmaDistribution
    caption_dropout: float
    strata: int = 1  # steps in a row that cover the noise levels evenly
    classes_every: int = 0  # class captions are used in every n-th step; 0: never
    reference_dropout: float = 0.0  # share of batches that are trained without their references

    def sizes(self, step: int) -> list[int]:
        """Return the number of samples in each batch of training step `step` (from 1). If a batch mixes image shapes,
        its samples are counted together. No sample is drawn.
        """
        return [self.order.batch_size] * self.order.accumulate

    def step(self, step: int) -> list[list[Sample]]:
        """Draw the samples of training step `step` (from 1). Return one list of samples per batch. If a batch mixes
        image shapes, it gives one list per shape.
        """
        batches: list[list[Sample]] = []
        number = 0
        for at, batch in enumerate(self.order.step(step)):
            batches.append([])
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
        """Return the index, in `crop.captions`, of the caption that a sample is trained with. It is drawn at random, by
        the captions' weights. `step` is the training step, and `number` is the sample's index in the step, from 0.
        `crop` is the sample's crop (trained part of an image).
        """
        if crop.weights:
            return draws.weighted_choice(crop.weights, self.seed, "caption", step, number)
        return draws.choice(len(crop.captions), self.seed, "caption", step, number)

    def noise_of(self, step: int, sample: Sample, shape: tuple[int, ...]) -> np.ndarray:
        """Draw the noise of `sample` in step `step`: a float32 array with shape `shape`. It depends only on seed, step and the
        sample's number.
        """
        return draws.normal(shape, self.seed, "noise", step, sample.number)


def build_sampler(config: TrainConfig, data: Dataset) -> TrainingSampler:
    """Build the sampler of a run from the [train] settings `config` and the dataset `data` to train on."""
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
