"""The held-out images that a run is measured by: the same crops, noise levels and noise at every measurement."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from schemas.text_to_image.latents import LATENTS
from stages.stage import StageContext
from stages.text_to_image.stored_embeddings import embedding_reader
from stages.text_to_image.train.dataset import Crop
from stages.text_to_image.train.reader import MicroBatch, read_batch
from stages.text_to_image.train.sampler import Sample
from stages.text_to_image.train.selection import ValidationConfig
from stages.tuner import draws


class HeldOutImages:
    """The images held out from training, as samples that measure the run. Each sample is one crop at one noise level of
    [train.validation] `sigmas`, with the image's first caption. All measurements use the same noise.
    """

    def __init__(
        self, ctx: StageContext, crops: Sequence[Crop], config: ValidationConfig, batch_size: int, mask_floor: float = 0.0
    ) -> None:
        """Arrange the held-out `crops` in batches of at most `batch_size` samples. A sample is one crop at one noise
        level. `config` gives the noise levels `sigmas` and the seed of the noise. `ctx` gives access to the tables of
        latents and embeddings. `mask_floor` is the smallest weight that a mask can give to an image token, from 0 to 1.
        """
        self.ctx, self.crops, self.config, self.mask_floor = ctx, crops, config, mask_floor
        self.batches = level_batches([crop.shape for crop in crops], config.sigmas, batch_size)

    @property
    def count(self) -> int:
        """The number of samples of one measurement: crops times noise levels."""
        return len(self.crops) * len(self.config.sigmas)

    def samples(self) -> list[list[Sample]]:
        """Return the samples of one measurement, as one list per micro-batch. Each `Sample` is a crop with its first
        caption and one noise level. The order is the same in every measurement.
        """
        drawn = [(self.crops[row], float(np.float32(sigma))) for batch in self.batches for row, sigma in batch]
        samples = iter([Sample(n, 0, crop, crop.captions[0], False, sigma) for n, (crop, sigma) in enumerate(drawn)])
        return [[next(samples) for _ in batch] for batch in self.batches]

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Read the samples of one measurement from disk and yield them as micro-batches. The samples of one micro-batch
        are computed together.

        The tables are opened separately from the training's readers. Those readers release memory at another pace.
        """
        latents, embeddings = self.ctx.tensors(LATENTS), embedding_reader(self.ctx)
        for samples in self.samples():
            yield read_batch(samples, latents, embeddings, self.noise_of, self.mask_floor)

    def noise_of(self, sample: Sample, shape: tuple[int, ...]) -> np.ndarray:
        """Return the noise of `sample`: a float32 array with shape `shape`. It depends only on the validation seed and the crop,
        so it is equal at every noise level.
        """
        return crop_noise(shape, self.config.seed, sample.crop.latent_id)


def level_batches(shapes: Sequence[Hashable], sigmas: Sequence[float], batch_size: int) -> list[list[tuple[int, float]]]:
    """Combine every crop with every noise level in `sigmas`, and return the combinations as batches of (crop index, sigma).
    `shapes` holds the shape of each crop. All crops of a batch have one shape. A batch has at most `batch_size` entries.
    """
    by_shape: dict[Hashable, list[tuple[int, float]]] = {}
    for row, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).extend((row, sigma) for sigma in sigmas)
    return [pairs[n : n + batch_size] for pairs in by_shape.values() for n in range(0, len(pairs), batch_size)]


def crop_noise(shape: tuple[int, ...], seed: int, latent_id: str) -> np.ndarray:
    """Draw the validation noise of one crop: a float32 array with shape `shape`. It depends only on `seed` and `latent_id`."""
    return draws.normal(shape, seed, f"validation {latent_id}")
